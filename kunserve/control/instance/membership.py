"""An instance's place in the group in which it stands, from its entry to the next change.

The first stage leads: it alone has the group's scheduler.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kunserve.control.group.cache_journal import Cleared
from kunserve.control.group.scheduler import Scheduler
from kunserve.control.instance.body import Body
from kunserve.control.instance.output_head import OutputHead, find_head
from kunserve.control.instance.state import InstanceState
from kunserve.core.ids import InstanceId, RequestId, StepId
from kunserve.core.layout import GroupLayout, LayerRange
from kunserve.core.step import BlockRun, StepPlan
from kunserve.policy.batch.relief import NO_HOST, HostLink, group_host_link
from kunserve.policy.drop.capacity import group_capacity_blocks


@dataclass(slots=True)
class Membership:
    """One instance in one group."""

    layout: GroupLayout
    layers: LayerRange
    """Which this instance computes."""
    capacity_blocks: int
    """KV blocks of the group when no change narrows it."""
    scheduler: Scheduler | None
    """Only the leader has one."""
    head: OutputHead | None
    """None where the last stage computes the output head alone."""
    following: InstanceId | None
    """Who gets this stage's hidden states; None behind the last one."""
    last_step_s: float
    """When the leader heard of a step's end, or of its entry."""
    ready: deque[tuple[StepPlan, Any]] = field(default_factory=deque)
    """Microbatches to run: from the stage before, or the leader's own that lacked units."""
    swapped_out: tuple[BlockRun, ...] = ()
    """What the last plan copied to host memory: its units are free as of the next."""
    freed_step: StepId | None = None
    """The last plan whose blocks were freed, kept and shared as it says."""
    former_requests: dict[RequestId, InstanceId] = field(default_factory=dict)
    """New leaders of requests that this instance led before it entered."""

    @property
    def is_alone(self) -> bool:
        """Whether this instance computes all layers, so that nobody else waits for its copies."""
        return self.scheduler is not None and self.following is None

    @property
    def has_ready(self) -> bool:
        """Whether a microbatch is here that may run. One that was to run ahead, and lacked room,
        awaits its tokens.
        """
        awaits = self.scheduler is not None and self.scheduler.feeds_on is not None
        return bool(self.ready) and not awaits

    def knows(self, request_id: RequestId) -> bool:
        """Whether an abort of the request finds it, here or by forwarding."""
        return (
            self.scheduler is None
            or request_id in self.former_requests
            or self.scheduler.migration.knows(request_id)
        )

    def reset_prefix_cache(self) -> None:
        """Forget what no request shares, where this instance leads."""
        if self.scheduler is not None:
            self.scheduler.cache.reset()


def enter_group(state: InstanceState, layout: GroupLayout, now_s: float) -> Membership:
    """Stand in a new group. The instance's memory has been laid out for it."""
    if state.journal is not None:
        state.journal.note(Cleared())
    layers = layout.layers_of(state.me)
    assert layers is not None, (state.me, layout)
    capacity_blocks = group_capacity_blocks(layout, state.specs)
    scheduler = None
    if layout.leader == state.me:
        scheduler = Scheduler(
            config=state.config.scheduler,
            group_id=layout.group_id,
            num_stages=len(layout.stages),
            block_size=state.spec.block_size,
            capacity_blocks=capacity_blocks,
            eos_token_ids=state.config.eos_token_ids,
            max_model_len=state.config.max_model_len,
            totals=state.totals,
            host_link=_find_host_link(state, layout),
            measured=state.config.measured,
            journal=state.journal,
        )
    head = find_head(state, layout)
    behind = layout.members[layout.members.index(state.me) + 1 :]
    following = behind[0] if behind else None
    return Membership(layout, layers, capacity_blocks, scheduler, head, following, now_s)


def next_plan(scheduler: Scheduler, body: Body, now_s: float) -> StepPlan | None:
    """The leader's, where necessary after copies to host memory that leave nothing else to do."""
    is_copying = body.is_copying
    plan = scheduler.schedule(now_s, is_copying=is_copying)
    if plan is not None or not is_copying:
        return plan
    body.end_copies()
    return scheduler.schedule(now_s)


def cached_units(memberships: Iterable[Membership | None]) -> dict[InstanceId, int]:
    """KV units that only the prefix cache holds, of each instance whose leader is among these."""
    return {
        member: layers.num_layers * one.scheduler.cached_blocks
        for one in memberships
        if one is not None and one.scheduler is not None
        for member, layers in one.layout.stages
    }


def _find_host_link(state: InstanceState, layout: GroupLayout) -> HostLink:
    """The group's way to host memory; ``NO_HOST`` where nobody is swapped."""
    swap = state.config.measured.swap
    if swap is None:
        return NO_HOST
    stages = [(state.specs[member].unit_bytes, held) for member, held in layout.stages]
    return group_host_link(
        swap.host_bytes_per_s,
        swap.host_bytes,
        [unit_bytes * held.num_layers for unit_bytes, held in stages],
    )
