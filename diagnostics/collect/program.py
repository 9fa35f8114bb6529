"""The user's program in this process: a script, a module or a function of a file, with its arguments and its
``__main__``."""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import runpy
import sys
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

from opgraft.diagnostics.collect.events import Raised
from opgraft.diagnostics.collect.place import from_summaries
from opgraft.diagnostics.collect.recorder import Recorder

REPEATS = 5
_RUNNERS = (runpy.__file__, "<frozen runpy>", "<frozen importlib")
"""What lies between this file and the program in a traceback."""


def run(kind: str, target: str, arguments: list[str], recorder: Recorder, ended: dict[str, Any]) -> None:
    """Runs the program; leaves in ``ended`` how it went. What it raises is told as ``python`` would tell it."""
    own = len(traceback.extract_stack())
    try:
        {"script": _script, "module": _module, "function": _function}[kind](target, arguments)
    except SystemExit as leaving:
        ended["how"] = "exit"
        ended["exit_code"] = _code(leaving)
        raise
    except KeyboardInterrupt as error:
        ended.update(how="interrupt", exit_code=130, detail="Ctrl-C")
        _raised(error, recorder, own)
        raise SystemExit(130) from None
    except BaseException as error:
        ended.update(how="exception", exit_code=1, detail=_one_line(error))
        _raised(error, recorder, own)
        raise SystemExit(1) from None


def _script(path: str, arguments: list[str]) -> None:
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    # As python does, from here on by the absolute path: the program may change its folder.
    path = os.path.join(os.getcwd(), path)
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=path,
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
        __annotations__={},
        __builtins__=builtins,
        __cached__=None,
    )
    with io.open_code(path) as source:
        code = compile(source.read(), path, "exec", dont_inherit=True)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _module(name: str, arguments: list[str]) -> None:
    sys.argv = [name, *arguments]
    sys.path.insert(0, os.getcwd())
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except ImportError as error:
        if traceback.extract_tb(error.__traceback__)[-1].filename.startswith(_RUNNERS[:2]):
            _refuse(str(error))
        raise


def _function(target: str, arguments: list[str]) -> None:
    """``FILE.py:function`` is called; where it returns (model, inputs), the model is compiled and called a few
    times."""
    path, _, name = target.rpartition(":")
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    import importlib.util

    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        _refuse(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        _refuse(f"{path} has no function {name}")
    built = function()
    if isinstance(built, tuple) and len(built) == 2 and callable(built[0]):
        import torch

        model, inputs = built
        compiled = torch.compile(model)
        for _ in range(REPEATS):
            compiled(*inputs) if isinstance(inputs, (tuple, list)) else compiled(inputs)


def _refuse(sentence: str) -> NoReturn:
    """Ends as a command does that cannot run its target."""
    print(f"opgraft explain: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def _code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    return leaving.code if isinstance(leaving.code, int) else 1


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _raised(error: BaseException, recorder: Recorder, own: int) -> None:
    """Writes the event, and prints the traceback without the frames of this package at its head."""
    frames = error.__traceback__
    here = os.path.dirname(os.path.abspath(__file__))
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith((here, *_RUNNERS)):
        frames = frames.tb_next
    error.__traceback__ = frames
    stack = from_summaries(traceback.extract_tb(frames))
    recorder.event(
        Raised(
            type=f"{type(error).__module__}.{type(error).__qualname__}",
            text=str(error)[:8000],
            stack=stack[-60:],
            compiling=type(error).__module__.startswith("torch._dynamo"),
        )
    )
    sys.excepthook(type(error), error, frames)
