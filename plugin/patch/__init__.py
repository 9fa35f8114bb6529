"""``opgraft.patch(model)``: slow paths of known model families swapped for the ops, checked, and put back on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from opgraft.patch import causal_lm, mamba, recurrent_gemma, rms_norm
from opgraft.patch.change import Change, Swap
from opgraft.patch.verify import disagreement

__all__ = ["Change", "Report", "patch"]

# Each family: the swaps that would serve a module, none where it does not know the module's class.
_FAMILIES: tuple[Callable[[nn.Module], list[Swap]], ...] = (
    mamba.swaps,
    recurrent_gemma.swaps,
    rms_norm.swaps,
    causal_lm.swaps,
)


@dataclass
class Report:
    """What was changed, and what was left alone and why. ``undo()`` puts everything back."""

    changes: list[Change] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)

    def undo(self) -> None:
        """Puts the original functions back, the last change first. A second call does nothing."""
        while self.changes:
            self.changes.pop().undo()

    def __str__(self) -> str:
        lines = [f"{c.name}: {', '.join(c.replaced)} (largest difference {c.difference:.2g})" for c in self.changes]
        lines += [f"{name}: left alone, {reason}" for name, reason in self.left_alone.items()]
        return "\n".join(lines) or "nothing to do"


def patch(model: nn.Module) -> Report:
    """Swaps the slow paths of the model families that opgraft knows.

    Known are the mixers of transformers' Mamba, FalconMamba, Jamba and Zamba, the short convolutions of the hybrids
    that define them alike (Lfm2, Qwen3Next and others), RecurrentGemma's RG-LRU, and the RMS norms of any model, found
    by what they compute (Llama, Qwen, Mistral, Gemma and alike); for training, prefill and decoding with a cache, in
    eager and under ``torch.compile(fullgraph=True)``, where the norms stay the compiler's. The functions of the
    mixers belong to transformers' modules, so every model of the same class in this process changes with this one.
    Known as well is the loss of causal and masked language models (Llama, Qwen, Mistral, Gemma and whatever computes
    the same).

    Every kind of module that is changed is run before and after on a small random input of the module's device and
    dtype: outputs and gradients that disagree by more than the dtype's rounding put the original back, and the report
    says so.

    Args:
        model: any module; what is not known stays as it is and is named in the report where it looks like a candidate.

    Returns:
        The report; ``report.undo()`` puts everything back.
    """
    report = Report()
    done: set[object] = set()
    for name, module in model.named_modules():
        for family in _FAMILIES:
            swaps = [swap for swap in family(module) if swap.key not in done]
            if not swaps:
                continue
            change = Change(name or type(module).__name__, tuple(swap.name for swap in swaps), tuple(swaps))
            difference, allowed = disagreement(module, change)
            if difference is None:
                report.left_alone[change.name] = "there is no small input to check it with"
            elif difference <= allowed:
                done.update(swap.key for swap in swaps)
                change.difference = difference
                change.do()
                report.changes.append(change)
            else:
                report.left_alone[change.name] = f"results differ by {difference:.2g}, allowed is {allowed:.2g}"
    if not report.changes and not report.left_alone:
        report.left_alone[type(model).__name__] = "no module of a known family in it"
    return report
