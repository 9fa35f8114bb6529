"""One cause, one finding: what merely follows from another finding about the same op is taken back."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from opgraft.diagnostics.model import Finding, Location

# A kind on the left, found for an op, explains the kinds on the right for that op.
EXPLAINS: dict[str, tuple[str, ...]] = {
    "missing-kernel": ("*",),
    "composite-kernel": ("missing-fake", "missing-autograd", "fake-mismatch", "compiler-bug", "not-exportable"),
    "missing-fake": ("fake-mismatch", "fake-specializes", "compiler-bug", "not-exportable", "cache-bypass"),
    "autocast": ("fake-mismatch", "compiler-bug"),
    "undeclared-mutation": (
        "dropped-effect",
        "unstable-result",
        "wrong-gradient",
        "double-backward",
        "compiler-bug",
        "output-alias",
        "layout-assumed",
        "precision",
        "missing-autograd",
        "fake-mismatch",
        "kernel-not-run",
    ),
    "output-alias": ("fake-mismatch", "compiler-bug", "missing-autograd", "wrong-gradient", "functional-copy"),
    "fake-mismatch": ("fake-specializes", "compiler-bug", "precision", "layout-copy", "not-exportable"),
    "fake-specializes": ("recompile", "compiler-bug"),
    "missing-autograd": ("wrong-gradient", "gradient-layout", "double-backward", "compiler-bug"),
    "wrong-gradient": ("double-backward", "compiler-bug"),
    "gradient-layout": ("compiler-bug", "wrong-gradient"),
    "gradient-layout of the forward": ("layout-assumed", "misaligned", "out-of-bounds", "wrong-value"),
    "index-overflow": ("layout-assumed", "wrong-value"),
    "misaligned": ("layout-assumed", "compiler-bug", "empty-input"),
    "layout-assumed": ("compiler-bug", "precision", "wrong-value"),
    "empty-input": ("compiler-bug",),
    "unstable-result": (
        "wrong-value",
        "compiler-bug",
        "precision",
        "wrong-gradient",
        "double-backward",
        "dropped-effect",
        "layout-assumed",
        "misaligned",
        "not-exportable",
        "index-overflow",
    ),
    # Seen on contiguous tensors: whatever lies behind them then decides, in another layout too.
    "out-of-bounds": (
        "wrong-value",
        "unstable-result",
        "compiler-bug",
        "layout-assumed",
        "misaligned",
        "index-overflow",
        "not-exportable",
        "precision",
        "wrong-gradient",
        "wrong-stream",
        "wrong-device",
    ),
    "wrong-value": ("compiler-bug", "precision", "wrong-gradient"),
    "wrong-stream": ("unstable-result", "wrong-value", "cudagraph-skip", "compiler-bug"),
    "hidden-sync": ("cudagraph-skip",),
    "unchecked-launch": ("wrong-value", "unstable-result"),
    "data-dependent-shape": ("cudagraph-skip", "fake-mismatch"),
    "dropped-effect": ("kernel-not-run", "cache-bypass"),
    "kernel-not-run": ("compiler-bug", "precision"),
    "stale-cache": ("compiler-bug",),
}
# What is wrong with gradients alone explains nothing that has this among its evidence.
GRADIENTS_OFF = "seen with gradients off"
OF_GRADIENTS = frozenset({"missing-autograd", "wrong-gradient", "gradient-layout", "double-backward"})
# Evidence in these words names an op that the backward of the found one calls.
CALLS = "its backward calls"
_RANK = {"error": 0, "warning": 1, "note": 2}


def _op(finding: Finding) -> str:
    return finding.callee.name if finding.callee is not None else ""


def settle(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings with one entry an op and kind, the worst first; places of the others are its ``sites``."""
    kept: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        key = (_op(finding), finding.kind)
        known = kept.get(key)
        if known is None:
            kept[key] = finding
            continue
        first, other = sorted((known, finding), key=lambda found: _RANK[found.severity])
        kept[key] = msgspec.structs.replace(
            first, sites=_places((*first.sites, first.location, *other.sites, other.location))
        )
    by_op: dict[str, set[str]] = {}
    for (op, kind), finding in kept.items():
        # A hazard under autocast says nothing of a fault outside of it.
        if finding.severity != "note" and not (kind == "autocast" and finding.severity != "error"):
            by_op.setdefault(op, set()).add(kind)
    for finding in kept.values():
        if finding.kind == "gradient-layout":
            for line in finding.evidence:
                if line.startswith(CALLS):
                    by_op.setdefault(line.removeprefix(CALLS).strip(), set()).add(f"{finding.kind} of the forward")
    chosen = []
    for (op, kind), finding in kept.items():
        causes = by_op.get(op, set()) - {kind}
        if GRADIENTS_OFF in finding.evidence:
            causes -= OF_GRADIENTS
        if any(kind in EXPLAINS.get(cause, ()) or "*" in EXPLAINS.get(cause, ()) for cause in causes):
            continue
        chosen.append(finding)
    return tuple(sorted(chosen, key=lambda found: _RANK[found.severity]))


def _places(locations: tuple[Location, ...]) -> tuple[Location, ...]:
    seen: dict[tuple[str, int], Location] = {}
    for location in locations:
        seen.setdefault((location.path, location.line), location)
    return tuple(seen.values()) if len(seen) > 1 else ()
