"""Runs the user's program in this process, as ``python`` would, and streams what the hooks see to a file.

Started as a file, never imported: ``python child.py EVENTS RECORDING KIND TARGET [ARGS...]`` with KIND ``script``,
``module`` or ``function``. It imports of this package what collects, not ``opgraft`` itself: that would import torch
before the program has set up its environment."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve()


def _stand_in() -> None:
    """Lets ``opgraft.diagnostics`` be imported without running ``opgraft/__init__.py``."""
    for name, folder in (("opgraft", _HERE.parents[2]), ("opgraft.diagnostics", _HERE.parents[1])):
        module = types.ModuleType(name)
        module.__path__ = [str(folder)]
        sys.modules[name] = module


def _leave() -> None:
    """Gives the name ``opgraft`` back to the program, and binds our part to it when the program imports it."""
    from opgraft.diagnostics.collect import arrival

    del sys.modules["opgraft"]
    placeholder = sys.modules.pop("opgraft.diagnostics")

    def bind(module: Any) -> None:
        for part in ("collect", "model", "_compat"):
            loaded = sys.modules.get(f"opgraft.diagnostics.{part}")
            if loaded is not None and not hasattr(module, part):
                setattr(module, part, loaded)

    def forget(module: Any) -> None:
        sys.modules.pop("opgraft.diagnostics", None)

    sys.modules["opgraft.diagnostics"] = placeholder
    arrival.when_imported("opgraft", forget)
    arrival.when_imported("opgraft.diagnostics", bind)


def main() -> None:
    events, recording, kind, target, *arguments = sys.argv[1:]
    _stand_in()
    from opgraft.diagnostics.collect import site_list
    from opgraft.diagnostics.collect.program import run
    from opgraft.diagnostics.collect.recorder import Recorder
    from opgraft.diagnostics.collect.stream_file import StreamFile

    recorder = Recorder(StreamFile(Path(events)), (target, *arguments), sample=True)
    recorder.start()
    check_ops = _record_ops(Path(recording)) if recording else _nothing
    site_list.install_in_child()
    _leave()
    ended: dict[str, Any] = {"exit_code": 0, "how": "ok", "detail": ""}
    open_ = [True]

    def finish() -> None:
        if open_:
            open_.clear()
            recorder.stop(**ended)
            check_ops()

    atexit.register(finish)
    try:
        run(kind, target, arguments, recorder, ended)
    finally:
        # Not only at exit: the finalizers of torch.library.Library, which run first there, take the ops away.
        finish()


def _nothing() -> None:
    return


def _record_ops(recording: Path) -> Callable[[], None]:
    """Lets the doctor record the calls of custom ops, and check them at the end; without its part the run is only
    watched."""
    if importlib.util.find_spec("opgraft.diagnostics.conform.record") is None:
        return _nothing
    try:
        from opgraft.diagnostics.conform.record import install
    except ImportError:
        return _nothing
    try:
        stop: Callable[[], None] = install(recording)
    except Exception as error:
        print(f"opgraft: the calls of custom ops are not recorded: {error}", file=sys.stderr)
        return _nothing
    return stop


if __name__ == "__main__":
    # The program must not find this file's folder on its path: `import events` has to mean its own module.
    if sys.path and Path(sys.path[0] or os.curdir).resolve() == _HERE.parent:
        del sys.path[0]
    main()
