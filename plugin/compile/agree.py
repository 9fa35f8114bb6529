"""One decision for all ranks of a job, through the key-value store that the process group already has.

Rank 0 decides. No collective is used: ranks may compile different graphs, or in another order, and a collective would
hang there. A rank that waits in vain, because rank 0 has no such site, decides for itself from then on, and publishes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch

from opgraft import _compat
from opgraft.compile.site import Decision

_PREFIX = "opgraft/decision/"


def group_store() -> Any:
    """The job's store; None outside a job of several ranks, and for the fake process groups of tests."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() < 2:
        return None
    return None if distributed.get_backend() == "fake" else _compat.default_store()


class Agreement:
    """Asks rank 0 first; ``patience`` is how many seconds a rank waits for a decision of another."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._waits = True

    def settle(self, key: str, decide: Callable[[], Decision]) -> Decision:
        """The job's decision under a key, taken by ``decide`` where this rank is the one to take it."""
        store = group_store()
        if store is None:
            return decide()
        name = _PREFIX + key
        if torch.distributed.get_rank() == 0 and not store.check([name]):
            found = decide()
            store.set(name, json.dumps(asdict(found)))
            return found
        if self._waits or store.check([name]):
            try:
                store.wait([name], timedelta(seconds=self._patience))
                return _parsed(store.get(name))
            except Exception:
                self._waits = False
        if store.add(_PREFIX + "claim/" + key, 1) == 1:
            found = decide()
            store.set(name, json.dumps(asdict(found)))
            return found
        store.wait([name], timedelta(seconds=self._patience))
        return _parsed(store.get(name))


def _parsed(text: bytes) -> Decision:
    fields = json.loads(text)
    if fields["interval"] is not None:
        fields["interval"] = tuple(fields["interval"])
    return Decision(**fields)
