"""An op without a fake kernel.

**What it means.** The compiler runs the op on tensors without data to learn the shapes of its results. This op has no
function for that.

**Why it matters.** An op from ``torch.library.custom_op`` without a fake fails to compile; one from ``Library.define``
breaks the graph at every call.

Fails::

    @torch.library.custom_op("mylib::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

Passes, with this beside it::

    @double.register_fake
    def _(x):
        return x.new_empty(x.shape)

**Remedies.** ``add-fake`` (torch 2.4 and newer).
"""

from __future__ import annotations

from collections.abc import Iterator

from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, sentence

KIND = "missing-fake"
WORDS = (
    "no fake impl",
    "does not have a fake impl",
    "Unsupported operator",
    "no meta function",
    "with arguments from the 'Meta' backend",
    "There was no fake impl registered",
    "could not run",
)


def lacks_fake(error: BaseException | None, name: str = "") -> bool:
    """Does this error say that an op has no fake (and, where ``name`` is given, that it is this one)?"""
    text = f"{type(error).__name__} {error}"
    told = any(word.lower() in text.lower() for word in WORDS) or "UnsupportedOperatorException" in text
    return told and (not name or name in text.replace(".default", "").replace(".", "::"))


def with_fake(bench: Bench) -> None:
    """For checks of what a fake says.

    Raises:
        NotApplicable: there is none.
    """
    if bench.facts.is_composite:
        raise NotApplicable("a composite op has no fake of its own")
    for case in bench.usable(iter(bench.cases[:1])):
        if lacks_fake(bench.fake(case).error):
            raise NotApplicable("the op has no fake")


def check(bench: Bench) -> Iterator[Fault]:
    if bench.facts.is_composite:
        raise NotApplicable("a composite op is traced through its parts")
    for case in bench.usable(iter(bench.cases[:1])):
        result = bench.fake(case)
        if lacks_fake(result.error):
            met = not bench.recorded or "compile" in bench.met
            yield Fault(
                f"{bench.name} has no fake: the compiler cannot know the shapes of its results",
                case,
                evidence=(sentence(result.error),),
                severity="error" if met else "note",
            )
