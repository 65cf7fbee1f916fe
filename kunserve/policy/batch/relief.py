"""What a group does when KV memory runs out within it: whom to preempt, and what becomes of its KV.

Preempted KV is thrown away and computed again, or swapped to host memory as in InferCept
(ICML'24): copies run beside the steps and are bounded by what a step's time hides.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Preemptible(NamedTuple):
    """A running request that may be thrown out."""

    priority: float
    """The lower, the later it goes."""
    arrival_s: float
    order: int
    """Breaks ties of arrival."""


def choose_victim(running: Sequence[Preemptible], grower: int) -> int | None:
    """Whom to preempt so that request ``grower`` of ``running`` can grow: the latest arrival of
    the least urgent.

    None if that is the grower itself. It waits, keeping its KV, while everybody before it goes on
    and may throw it out: recomputing it now would help nobody sooner.
    """
    latest = max(range(len(running)), key=running.__getitem__)
    return None if latest == grower else latest


class Relief(enum.Enum):
    """What becomes of a victim's KV."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class HostLink:
    """A group's way to host memory, in its own blocks."""

    blocks_per_s: float
    """Each way, in the time that steps take over all stages together."""
    capacity_blocks: int | None
    """Of host memory; None is no limit."""

    def has_room(self, num_blocks: int) -> bool:
        """Whether host memory holds so many."""
        return self.capacity_blocks is None or num_blocks <= self.capacity_blocks


NO_HOST = HostLink(1.0, 0)
"""Where nothing goes to host memory."""


def group_host_link(
    bytes_per_s: float, host_bytes: int | None, stage_block_bytes: Sequence[int]
) -> HostLink:
    """A group's link from its instances': each stage moves its layers of a block by itself.

    A stage has its share of the layers' bytes to move, and its share of a step's time to hide
    them behind. So a step over all stages hides what one instance would move in all of it; the
    stages move their shares one after the other, as they compute.
    """
    capacity = None if host_bytes is None else host_bytes // max(stage_block_bytes)
    return HostLink(bytes_per_s / sum(stage_block_bytes), capacity)


@dataclass(frozen=True, slots=True)
class VictimView:
    """A victim, as far as its KV goes."""

    num_blocks: int
    """Of its KV."""
    other_blocks: int
    """Of everybody else's in the group."""
    recompute_s: float
    """Time to compute its KV again."""


def choose_relief(victim: VictimView, link: HostLink, used_host_blocks: int) -> Relief:
    """The way that wastes less: memory held without progress, times time (InferCept, section 3).

    ``discard = T_fwd(C) * C + T_fwd(C) * C_other``: while the victim is computed again its own
    blocks give nothing new, and the others' wait for that compute.
    ``swap = 2 * T_swap(C) * C``: hidden behind steps, the copies out and back hold nobody up,
    but the victim's blocks are of no use meanwhile.
    Full host memory leaves no choice.
    """
    if not link.has_room(used_host_blocks + victim.num_blocks):
        return Relief.RECOMPUTE
    swap_s = victim.num_blocks / link.blocks_per_s
    wasted_by_swap = 2.0 * swap_s * victim.num_blocks
    wasted_by_discard = victim.recompute_s * (victim.num_blocks + victim.other_blocks)
    return Relief.SWAP if wasted_by_swap <= wasted_by_discard else Relief.RECOMPUTE


def hidden_blocks(link: HostLink, step_s: float) -> int:
    """How many blocks go each way while a step of ``step_s`` computes; one at least.

    The one may take longer than the step. Without it a slow link would never move anything.
    """
    return max(1, int(link.blocks_per_s * step_s))
