"""Is a model with the choice of kernels ever slower than with the compiler alone, and is each choice the better side?

    python benchmarks/choice.py [--train] [--device cuda] [--only NAME ...] [--mode reduce-overhead] [--json FILE]
    python benchmarks/choice.py --compile [--only NAME ...]      times of first compiles and of second processes

Every model is compiled plain, plain twice again (A/A, the noise floor: compiles of one graph differ), with
choose="measured", and once for every kind of site with that kind alone turned to its other side. All are timed against
plain by turns, as whole steps; a ratio is the plain compile's time over the arm's. A choice is right where it is the
side that the whole model runs faster with, and a tie where the two differ by no more than A/A. Where other kinds were
changed, a kind is turned beside these too, and that decides: two kinds may mend the same fault of the compiler's code,
and the second then gains nothing. With OMP_NUM_THREADS=1 on a CPU the time is the processor's, not the clock's: what
other processes take of a shared machine is then left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from choice_models import models
from torch import nn

import opgraft
from opgraft.compile import timing
from opgraft.compile.site import COMPILER, KERNEL, Decision, SiteReport
from opgraft.compile.store import Store, architecture

_TOLERATED = 0.995


class Forced(Store):
    """Gives the kinds of sites in a table their choices, and every other what stands in the model."""

    def __init__(self, choices: dict[str, str], calls: frozenset[str]) -> None:
        super().__init__(tempfile.gettempdir(), read_only=True)
        self.choices, self.calls = choices, calls

    def find(self, device: str, key: str) -> Decision:
        as_given = KERNEL if key in self.calls else COMPILER
        return Decision(self.choices.get(key, as_given), "forced")

    def digest(self) -> str:
        return repr(sorted(self.choices.items()))

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True)
class Kind:
    """One kind of site of a model, and what the whole model says of its two sides."""

    name: str
    sites: int
    chosen: str
    why: str
    kernel_over_compiler: float  # alone, beside what stands in the model
    interval: tuple[float, float]
    as_chosen: tuple[float, float, float] | None  # the same beside the other kinds as chosen, where any was changed
    verdict: str  # "right", "wrong", "tie"


@dataclass(frozen=True)
class Row:
    model: str
    step_ms: float
    noise: tuple[float, float]
    ratio: float
    interval: tuple[float, float]
    kinds: tuple[Kind, ...]

    @property
    def slower(self) -> bool:
        """True where the model lost beyond the tolerated half per cent and the noise of A/A."""
        return self.interval[1] < min(_TOLERATED, self.noise[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], help="models whose name holds one of these words")
    parser.add_argument("--mode", default=None, help="torch.compile's mode")
    parser.add_argument("--seconds", type=float, default=3.0, help="timing of one pair, at least")
    parser.add_argument("--no-kinds", action="store_true", help="do not turn single kinds of sites")
    parser.add_argument("--compile", action="store_true", help="time compiles instead of steps")
    parser.add_argument("--repeats", type=int, default=5, help="second processes of each kind, with --compile")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "ARM"), help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help="a file: processes that share it compile at once and time by turns")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(_compile_once(*given.one, given.device, given.train)))
        return
    chosen = [n for n in models(given.device) if not given.only or any(word in n for word in given.only)]
    kind = "training" if given.train else "inference"
    mode = given.mode or "default"
    print(f"torch {torch.__version__}, {architecture(given.device)}, {kind}, mode {mode}", end="", flush=True)
    print(", processor time of one thread" if _tick(given) else "", flush=True)
    if given.compile:
        _compile_times(chosen, given.device, given.train, given.repeats)
        return
    if given.lock:
        _by_turns(given.lock)
    rows = []
    for name in chosen:
        try:
            rows.append(_compare(name, given))
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}", flush=True)
    _summary(rows)
    if given.json:
        given.json.write_text(json.dumps([_plain(row) for row in rows], indent=1) + "\n")


def _by_turns(path: Path) -> None:
    """From now on this process times only while it holds the lock, in choices as well as here."""
    until = timing.until

    def alone(*args: Any, **options: Any) -> timing.Samples:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return until(*args, **options)

    timing.until = alone


def _plain(row: Row) -> dict[str, Any]:
    return {**row.__dict__, "kinds": [kind.__dict__ for kind in row.kinds]}


def step(compiled: Callable[..., torch.Tensor], model: nn.Module, inputs: Any, train: bool) -> Callable[[], None]:
    parameters = [p for p in model.parameters() if p.requires_grad]

    def run() -> None:
        if not train:
            with torch.no_grad():
                compiled(*inputs)
        else:
            loss = compiled(*inputs).float().square().mean()
            torch.autograd.grad(loss, parameters, allow_unused=True)

    return run


def _compare(name: str, given: argparse.Namespace) -> Row:
    torch._dynamo.reset()
    model, inputs = models(given.device)[name](given.device)
    model.train(given.train)
    synchronise = torch.cuda.synchronize if given.device == "cuda" else lambda: None
    base = given.mode

    def compiled(arm: str, options: dict[str, Any] | None) -> Callable[[], None]:
        own = _with_code_of_its_own(model, arm)
        function = torch.compile(own, options=options) if options else torch.compile(own, mode=base)
        run = step(function, model, inputs, given.train)
        run()
        synchronise()
        return run

    def against(first: Callable[[], None], second: Callable[[], None]) -> tuple[timing.Verdict, float]:
        samples = timing.until(
            lambda v: v.second_is_faster or v.second_is_slower or v.interval[1] / v.interval[0] < 1.01,
            first, second, seconds=given.seconds, patience=3 * given.seconds, synchronise=synchronise,
            tick=_tick(given),
        )  # fmt: skip
        return timing.judge(samples), 1e3 * samples.medians[0]

    try:
        plain = compiled("plain", None)
    except Exception as error:
        raise RuntimeError(f"plain torch.compile fails ({type(error).__name__})") from error
    again = [compiled(arm, None) for arm in ("again", "third")]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        options = opgraft.compile_options(base, store=folder, tune_seconds=300.0)
        measured = compiled("measured", options)
        took = time.perf_counter() - began
        reports = _reports(options)
    found = [against(plain, other) for other in again]
    noise, milliseconds = _widest([verdict for verdict, _ in found]), found[0][1]
    verdict, _ = against(plain, measured)
    print(
        f"{name}: step {milliseconds:.2f} ms, A/A {_text(noise)}, measured {_text(verdict)} (first call {took:.0f} s)",
        flush=True,
    )
    kinds = [] if given.no_kinds else _kinds(reports, base, compiled, lambda *arms: against(*arms)[0], plain, noise)
    for kind in kinds:
        low, high = kind.interval
        print(
            f"    {kind.verdict:5}  {kind.name} x{kind.sites}: {kind.chosen}; kernel over compiler in the model "
            f"{kind.kernel_over_compiler:.3f} [{low:.3f}, {high:.3f}]{_beside(kind)}; {kind.why}",
            flush=True,
        )
    return Row(name, milliseconds, noise.interval, verdict.ratio, verdict.interval, tuple(kinds))


def _beside(kind: Kind) -> str:
    if kind.as_chosen is None:
        return ""
    ratio, low, high = kind.as_chosen
    return f", beside the others as chosen {ratio:.3f} [{low:.3f}, {high:.3f}]"


def _widest(verdicts: list[timing.Verdict]) -> timing.Verdict:
    """The verdict farthest from one, with an interval that holds all of them."""
    low = min(v.interval[0] for v in verdicts)
    high = max(v.interval[1] for v in verdicts)
    return dataclasses.replace(max(verdicts, key=lambda v: abs(v.ratio - 1)), interval=(low, high))


def _tick(given: argparse.Namespace) -> Callable[[], float] | None:
    return timing.busy if given.device == "cpu" and torch.get_num_threads() == 1 else None


def _kinds(
    reports: list[SiteReport],
    base: str | None,
    compiled: Callable[[str, dict[str, Any] | None], Callable[[], None]],
    against: Callable[[Callable[[], None], Callable[[], None]], timing.Verdict],
    plain: Callable[[], None],
    itself: timing.Verdict,
) -> list[Kind]:
    floor = max(itself.interval[1], 1 / itself.interval[0])  # what differs by less is not told apart
    of_key: dict[str, list[SiteReport]] = {}
    for report in reports:
        if report.key:
            of_key.setdefault(report.key, []).append(report)
    calls = frozenset(key for key, found in of_key.items() if not found[0].idiom)
    chosen = {key: found[0].decision.choice for key, found in of_key.items()}
    changed = {key: choice for key, choice in chosen.items() if (choice == COMPILER) == (key in calls)}

    def arm(name: str, choices: dict[str, str]) -> Callable[[], None]:
        return compiled(name, opgraft.compile_options(base, store=Forced(choices, calls)))

    def turned(name: str, key: str, beside: dict[str, str], without: Callable[[], None]) -> timing.Verdict:
        """The compiler's time over the kernel's at one kind; ``without`` is the model with ``beside`` alone."""
        side = COMPILER if key in calls else KERNEL
        verdict = against(without, arm(name, {**beside, key: side}))
        low, high = verdict.interval
        if side == KERNEL:
            return verdict
        return dataclasses.replace(verdict, ratio=1 / verdict.ratio, interval=(1 / high, 1 / low))

    kinds = []
    for i, (key, found) in enumerate(of_key.items()):
        alone = decisive = turned(f"kind{i}", key, {}, plain)
        others = {other: choice for other, choice in changed.items() if other != key}
        if others:
            decisive = turned(f"beside{i}", key, others, arm(f"others{i}", others))
        low, high = decisive.interval
        if low > max(1.0 + decisive.noise, floor):
            better = KERNEL
        elif high < 1.0 / max(1.0 + decisive.noise, floor):
            better = COMPILER
        else:
            better = ""
        told = better and abs(decisive.ratio - 1) >= 0.005
        outcome = "tie" if not told else "right" if better == chosen[key] else "wrong"
        name = f"{found[0].op} for {found[0].idiom}" if found[0].idiom else found[0].op
        as_chosen = (decisive.ratio, low, high) if others else None
        why = found[0].decision.why
        kinds.append(Kind(name, len(found), chosen[key], why, alone.ratio, alone.interval, as_chosen, outcome))
    return kinds


def _reports(options: dict[str, Any]) -> list[SiteReport]:
    found: list[SiteReport] = options["pre_grad_custom_pass"].chooser.reports
    return found


def _text(verdict: timing.Verdict) -> str:
    return f"{verdict.ratio:.3f} [{verdict.interval[0]:.3f}, {verdict.interval[1]:.3f}]"


def _summary(rows: list[Row]) -> None:
    kinds = [kind for row in rows for kind in row.kinds]
    told = [kind for kind in kinds if kind.verdict != "tie"]
    right = sum(kind.verdict == "right" for kind in told)
    slower = [row.model for row in rows if row.slower]
    print(f"\n{len(rows)} models, slower than plain torch.compile beyond the noise: {', '.join(slower) or 'none'}")
    ratios = [row.ratio for row in rows] or [1.0]
    print(f"smallest ratio {min(ratios):.3f}, largest {max(ratios):.3f}")
    print(f"{len(kinds)} kinds of sites, {len(told)} that the whole model can tell apart; right at {right} of these")


def _with_code_of_its_own(model: nn.Module, arm: str) -> Callable[..., torch.Tensor]:
    """The model as a function with a code object of its own: Dynamo tries all that share one in order."""

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(*inputs)
        return result

    call.__code__ = call.__code__.replace(co_name="call_" + "".join(c if c.isalnum() else "_" for c in arm))
    return call


class _Own:
    """The processor's time in what a compile with the choice does beside the compiler: steadier than two processes."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - before

        return run


def _compile_once(name: str, arm: str, device: str, train: bool) -> dict[str, float]:
    """The first step of a model in this process, in seconds, the processor's too, and what went into measuring."""
    from opgraft.compile import choice, passes

    model, inputs = models(device)[name](device)
    model.train(train)
    own = _Own()
    for holder, method in ((choice.Chooser, "apply"), (passes.SitePass, "uuid"), (passes.Seal, "uuid")):
        setattr(holder, method, own.counted(getattr(holder, method)))
    began, busy = time.perf_counter(), time.process_time()
    options = own.counted(opgraft.compile_options)() if arm == "opgraft" else None
    step(torch.compile(model, options=options), model, inputs, train)()
    if device == "cuda":
        torch.cuda.synchronize()
    took, worked = time.perf_counter() - began, time.process_time() - busy
    chooser = options["pre_grad_custom_pass"].chooser if options else None
    spent = chooser.seconds_spent if isinstance(chooser, choice.Chooser) else 0.0
    return {"seconds": took, "busy": worked, "measuring": spent, "own": own.seconds}


def _compile_times(names: list[str], device: str, train: bool, repeats: int) -> None:
    """First compile with cold caches, then fresh processes with warm ones, by turns: the least of ``repeats``."""
    # Python keeps the bytecode of what it imports, as after any installation.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for name in names:
        found: dict[str, list[dict[str, float]]] = {}
        with tempfile.TemporaryDirectory() as folder:
            for turn in range(1 + repeats):
                for arm in ("opgraft", "plain") if turn % 2 else ("plain", "opgraft"):
                    environment = {
                        **kept,
                        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/{arm}",
                        "OPGRAFT_STORE": f"{folder}/store",
                    }
                    command = [sys.executable, __file__, "--one", name, arm, "--device", device]
                    done = subprocess.run(
                        [*command, *(["--train"] if train else [])],
                        env=environment, capture_output=True, text=True, timeout=1200, check=True,
                    )  # fmt: skip
                    result = json.loads(done.stdout.splitlines()[-1])
                    found.setdefault(f"{arm} {'warm' if turn else 'cold'}", []).append(result)
        least = {key: {part: min(r[part] for r in runs) for part in runs[0]} for key, runs in found.items()}
        before, after = least["plain warm"], least["opgraft warm"]
        first, measuring = least["opgraft cold"]["seconds"], least["opgraft cold"]["measuring"]
        plain = least["plain cold"]["seconds"]
        print(
            f"{name}: first compile {plain:.1f} s plain, {first:.1f} s with {measuring:.1f} s of measuring: "
            f"{(first - measuring) / plain:.2f}x beside it; second process {before['seconds']:.2f} s plain, "
            f"{after['seconds']:.2f} s: {after['seconds'] / before['seconds']:.3f}x; the processor's time "
            f"{before['busy']:.2f} and {after['busy']:.2f} s: {after['busy'] / before['busy']:.3f}x; of it "
            f"the choice itself {1e3 * after['own']:.0f} ms, {1 + after['own'] / (after['busy'] - after['own']):.3f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
