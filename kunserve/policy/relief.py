"""What a group does when KV memory runs out within it: preemption by recomputation."""

from collections.abc import Sequence
from typing import NamedTuple


class Preemptible(NamedTuple):
    """A running request that may be thrown out."""

    arrival_s: float
    order: int
    """Breaks ties of arrival."""


def choose_victim(running: Sequence[Preemptible], grower: int) -> int | None:
    """Whom to preempt so that request ``grower`` of ``running`` can grow: the latest arrival.

    None if that is the grower itself. It waits, keeping its KV, while everybody who came earlier
    goes on and may throw it out: recomputing it now would help nobody sooner.
    """
    latest = max(range(len(running)), key=running.__getitem__)
    return None if latest == grower else latest
