"""Every kind of finding: its stable code, its remedies, and the module whose docstring is its page.

A code is never given to another kind. ``opgraft rules`` and ``docs/rules/`` are made from the modules named here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """``name`` is the JSON's ``kind``; ``remedies`` are the ids that a finding of this kind may carry."""

    code: str
    name: str
    remedies: tuple[str, ...]


_TABLE = """
OG101 opaque-call           register-op hoist-host-code leave-it
OG102 host-code             hoist-host-code register-op
OG103 host-read             read-shape keep-on-device
OG104 data-branch           use-torch-cond keep-on-device
OG105 side-effect           reorder-logging hoist-host-code
OG106 disabled              compile-around register-op leave-it
OG107 untraceable-autograd  register-op hoist-host-code
OG108 triton-launch         use-triton-op
OG109 other-break           torch-hint leave-it
OG201 missing-fake          add-fake
OG202 composite-kernel      register-per-backend
OG203 fake-mismatch         fix-fake
OG204 fake-specializes      use-symint fix-fake
OG205 missing-kernel        add-kernel load-library keep-library
OG206 bad-schema            fix-schema unique-namespace
OG207 autocast              add-autocast-rule
OG208 not-exportable        load-library add-sharding-rule fix-schema
OG301 missing-autograd      add-autograd
OG302 wrong-gradient        fix-autograd
OG303 gradient-layout       fix-autograd
OG304 double-backward       fix-autograd compile-inner-gradient keep-eager
OG401 functional-copy       make-functional add-out-variant reorder-writes
OG402 layout-copy           set-layout-tag honour-strides
OG403 layout-assumed        honour-strides set-layout-tag
OG404 misaligned            handle-unaligned
OG501 undeclared-mutation   declare-mutation make-functional
OG502 overdeclared-mutation declare-mutation
OG503 output-alias          return-fresh
OG601 wrong-stream          use-current-stream
OG602 hidden-sync           remove-sync
OG603 wrong-device          add-device-guard
OG604 unchecked-launch      check-launch
OG605 cudagraph-skip        make-functional keep-on-device leave-it
OG701 lost-fusion           decompose-here widen-op
OG702 call-overhead         register-in-cpp use-cuda-graphs
OG703 no-gain               decompose-here leave-it
OG704 library-jit           warm-up-first
OG801 recompile             mark-dynamic use-symint
OG802 data-dependent-shape  capture-dynamic-size declare-dynamic-size read-shape use-upper-bound
OG803 index-overflow        use-int64
OG804 empty-input           handle-empty
OG901 wrong-value           fix-kernel
OG902 out-of-bounds         fix-kernel
OG903 unstable-result       fix-kernel declare-effect pass-state
OG904 precision             leave-it
OG905 kernel-not-run        fix-dispatch
OG906 dropped-effect        declare-effect
OG907 stale-cache           clear-cache
OG908 cache-bypass          make-cacheable
OG909 compiler-bug          update-torch work-around
OG910 invalid-measurement   measure-again
"""

KINDS: dict[str, Kind] = {
    words[1]: Kind(words[0], words[1], tuple(words[2:]))
    for words in (line.split() for line in _TABLE.strip().splitlines())
}
BY_CODE: dict[str, Kind] = {kind.code: kind for kind in KINDS.values()}
