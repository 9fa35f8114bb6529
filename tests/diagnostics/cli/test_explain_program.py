"""``opgraft explain`` runs a program as ``python`` would, and always ends with a report."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from opgraft.diagnostics.report.json import json_schema

BROKEN = """
import torch

@torch.compile(backend="eager")
def step(x):
    x = x.sin()
    torch._dynamo.graph_break()
    return x.cos()
"""
LINE = 7


def explain(
    *arguments: str, cwd: Path, seconds: float = 240, **more: Any
) -> tuple[subprocess.CompletedProcess[bytes], Any]:
    command = [
        sys.executable,
        "-m",
        "opgraft.diagnostics.cli",
        "explain",
        "--no-check-ops",
        "--json",
        "out.json",
        *arguments,
    ]
    done = subprocess.run(command, cwd=cwd, capture_output=True, timeout=seconds, check=False, **more)
    out = cwd / "out.json"
    report = json.loads(out.read_bytes()) if out.exists() else None
    if report is not None:
        jsonschema.validate(report, json_schema())
    assert b"opgraft/diagnostics" not in done.stderr.replace(b"opgraft.diagnostics", b"")
    return done, report


def kinds(report: Any) -> list[str]:
    return [finding["kind"] for finding in report["findings"]]


def test_arguments_exit_code_and_bytes_pass_through(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("value = 5\n")
    (tmp_path / "program.py").write_text(
        "import sys, other\n" + BROKEN + "step(torch.ones(2))\nprint(sys.argv, __name__, other.value, flush=True)\n"
        "sys.stdout.buffer.write(bytes(range(256)))\nsys.exit(7)\n"
    )
    done, report = explain("program.py", "-a", "--json", "x", cwd=tmp_path)
    assert done.returncode == 7
    assert done.stdout == b"['program.py', '-a', '--json', 'x'] __main__ 5\n" + bytes(range(256))
    assert kinds(report) == ["other-break"]
    assert report["findings"][0]["location"]["line"] == LINE + 1
    assert report["run"]["exit_code"] == 7


def test_main_is_what_python_makes_of_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, sys, inspect\nos.chdir('/')\n"
        "print(__file__, sys._getframe().f_code.co_filename, __spec__, type(__loader__), __builtins__, __package__)\n"
        "print(__annotations__, sys.modules['__main__'], inspect.getsource(lambda: 5), sys.path[0])\n"
    )
    bare = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, timeout=60, check=True, text=True
    )
    done, _ = explain("program.py", cwd=tmp_path)
    assert done.stdout.decode() == bare.stdout


def test_an_exception_is_told_as_python_tells_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(BROKEN + "step(torch.ones(2))\nraise KeyError('gone')\n")
    done, report = explain("program.py", cwd=tmp_path)
    assert done.returncode == 1
    place = f'Traceback (most recent call last):\n  File "{tmp_path}/program.py", line 10, in <module>'
    assert place.encode() in done.stderr
    assert report["run"]["ended"] == "exception"
    assert kinds(report) == ["other-break"]


def test_a_failed_compile_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        BROKEN.replace('backend="eager"', 'backend="eager", fullgraph=True') + "step(torch.ones(2))\n"
    )
    done, report = explain("program.py", cwd=tmp_path)
    assert done.returncode == 1
    assert [(f["kind"], f["severity"], f["location"]["line"]) for f in report["findings"]] == [
        ("other-break", "error", LINE)
    ]


def test_a_killed_program_gives_what_was_seen(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        BROKEN + "step(torch.ones(2))\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done, report = explain("program.py", cwd=tmp_path)
    assert done.returncode == 128 + signal.SIGKILL
    assert (report["run"]["ended"], report["run"]["detail"]) == ("signal", "SIGKILL")
    assert kinds(report) == ["other-break"]


def test_forked_processes_are_seen_too(tmp_path: Path) -> None:
    forked = "import os\nif os.fork() == 0:\n    step(torch.ones(2))\n    os._exit(0)\nos.wait()\n"
    (tmp_path / "program.py").write_text(BROKEN + forked)
    done, report = explain("program.py", cwd=tmp_path)
    assert done.returncode == 0
    assert kinds(report) == ["other-break"]


def test_ctrl_c_ends_with_the_report(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        BROKEN + "step(torch.ones(2))\nimport time\nopen('ready', 'w').close()\ntime.sleep(200)\n"
    )
    command = [
        sys.executable,
        "-m",
        "opgraft.diagnostics.cli",
        "explain",
        "--no-check-ops",
        "--json",
        "out.json",
        "program.py",
    ]
    # A shell starts what runs in its background deaf to Ctrl-C, tests included: the program is not to be.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    running = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=heard,
    )
    for _ in range(900):
        if (tmp_path / "ready").exists():
            break
        time.sleep(0.1)
    os.kill(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=120)
    report = json.loads((tmp_path / "out.json").read_bytes())
    assert running.returncode == 130
    assert report["run"]["ended"] == "interrupt"
    assert kinds(report) == ["other-break"]
    assert b"KeyboardInterrupt" in errors


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("x = (1,\n", 1, "SyntaxError"),
        ("print('no torch at all')\n", 0, "The program has no torch.compile."),
        (
            "import torch\nm = torch.nn.Linear(2, 2)\ntorch.compile(m)\n",
            0,
            "Line 3 calls torch.compile and throws its result away",
        ),
        ("import torch\nf = torch.compile(len)\n", 0, "Line 2 compiles f, which is never called"),
        ("import torch\n@torch.compile\ndef f(x):\n    return x\n", 0, "Line 2 has torch.compile, but"),
    ],
)
def test_programs_that_compile_nothing(tmp_path: Path, source: str, code: int, words: str) -> None:
    (tmp_path / "program.py").write_text(source)
    done, report = explain("program.py", cwd=tmp_path)
    assert done.returncode == code
    assert report["findings"] == []
    assert words in " ".join(done.stderr.decode().split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere.py"], "there is no file nowhere.py"),
        (["nowhere.py:build"], "there is no file nowhere.py"),
        (["folder"], "folder is a folder, not a script"),
        (["-m", "no_such_module"], "there is no module no_such_module"),
        (["--nosuch", "fine.py"], "there is no option --nosuch; what is meant for the script comes after it"),
        ([], "give a script to run: opgraft explain SCRIPT [ARGS...], or -m MODULE"),
        (["--html", "no/such/x.html", "fine.py"], "cannot write no/such/x.html: there is no folder no/such"),
        (["--events", "folder", "fine.py"], "cannot write folder: it is a folder"),
    ],
)
def test_what_cannot_be_run_gets_one_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "fine.py").write_text("print('ran')\n")
    done, report = explain(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout, report) == (2, b"", None)
    assert done.stderr.decode().strip() == f"opgraft explain: {sentence}"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fine.py:build"], "opgraft explain: fine.py has no function build"),
        (["-m", "package"], "opgraft explain: No module named package.__main__"),
    ],
)
def test_a_target_that_turns_out_not_to_run(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "fine.py").write_text("print('ran')\n")
    done, report = explain(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.decode().startswith(sentence)
    assert b"Traceback" not in done.stderr
    assert report["findings"] == []


def test_a_report_that_could_not_be_written_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "program.py").write_text("import os\nos.rmdir('gone')\n")
    done, report = explain("--html", "gone/x.html", "program.py", cwd=tmp_path)
    assert done.returncode == 2
    assert b"opgraft explain: cannot write gone/x.html: No such file or directory" in done.stderr
    assert report["run"]["exit_code"] == 0


def test_input_reaches_the_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys\nsys.stdout.write(sys.stdin.read())\n")
    done, _ = explain("program.py", cwd=tmp_path, input=b"typed words")
    assert (done.returncode, done.stdout) == (0, b"typed words")


def test_modules_and_functions(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text(BROKEN + "import sys\nstep(torch.ones(2))\nprint(sys.argv[1:])\n")
    done, report = explain("-m", "package", "-x", "--json", "other.json", cwd=tmp_path)
    assert done.stdout == b"['-x', '--json', 'other.json']\n"
    assert kinds(report) == ["other-break"]
    (tmp_path / "build.py").write_text(
        BROKEN.replace('@torch.compile(backend="eager")\n', "") + "def build():\n    return step, (torch.ones(2),)\n"
    )
    done, report = explain("build.py:build", cwd=tmp_path)
    assert kinds(report) == ["other-break"]


def test_the_program_sets_up_its_own_environment(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import sys\nassert 'torch' not in sys.modules and 'opgraft' not in sys.modules\n"
        "import opgraft\nfrom opgraft import diagnostics\nimport opgraft.diagnostics as again\n"
        "assert opgraft.diagnostics is diagnostics is again\nassert callable(diagnostics.explain)\n"
    )
    done, _ = explain("program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
