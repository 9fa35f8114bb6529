"""What the ops over rows are meant to reach: a share of the copy where rows are many, no peer faster anywhere."""

from __future__ import annotations

from collections.abc import Sequence

# Of the copy, in bfloat16 on an H200, by op and what is measured.
SHARES = {
    ("cross_entropy", "forward"): 0.90,
    ("cross_entropy", "with gradient"): 0.85,
    ("rms_norm", "with gradient"): 0.88,
    ("add_rms_norm", "with gradient"): 0.88,
    ("add_rms_norm_fp8", "a scale a row"): 0.92,
    ("add_rms_norm_fp8", "1x128"): 0.90,
    ("silu_mul_fp8", "a scale a row"): 0.90,
    ("silu_mul_fp8", "1x128"): 0.90,
}


def verdict(took: float, share: float | None, goal: float | None, peers: Sequence[float]) -> str:
    """In words: is the goal met, and is any peer faster? ``took`` and ``peers`` in seconds."""
    said = []
    if goal is not None and share is not None:
        said.append(f"{100 * goal:.0f} % {'met' if share >= goal else 'MISSED'}")
    if peers:
        best = min(peers)
        said.append("no peer faster" if took <= best else f"BEHIND a peer by {100 * (took / best - 1):.1f} %")
    return ", ".join(said)
