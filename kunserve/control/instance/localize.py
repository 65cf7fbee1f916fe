"""How a step plan, which names requests, becomes work on units of one instance.

Every stage of a group does this for every plan, in the same order, before it runs it.
"""

from collections.abc import Iterator

import numpy as np

from kunserve.control.instance.block_table import NOTHING
from kunserve.control.instance.body import HostCopy, RunsAhead, StepWork
from kunserve.control.instance.changes.change import Change
from kunserve.control.instance.membership import Membership
from kunserve.control.instance.state import InstanceState
from kunserve.control.instance.work import Work
from kunserve.core.step import BlockRun, StepPlan


def _free_blocks(
    state: InstanceState, change: Change, membership: Membership, plan: StepPlan
) -> None:
    """Free, keep and share blocks as the plan says."""
    if membership.swapped_out:
        _free_swapped_out(state, membership, plan)
    for run in plan.swapped_out:
        change.swap_out(run.request_id)
    for kept in plan.kept:
        state.table.keep(*kept)
    if plan.released:
        for request_id in plan.released:
            change.release(request_id)
            state.body.forget(request_id)
        if membership.head is not None:
            membership.head.release(plan.released)
    for evicted in plan.evicted:
        change.evict(*evicted)
    for shared in plan.shared:
        state.table.share(*shared)


def _free_swapped_out(state: InstanceState, membership: Membership, plan: StepPlan) -> None:
    """What a plan before has copied to host memory holds no units any more, once it is there.

    Of a request that ends meanwhile it has to be there now.
    """
    if state.body.is_copying:
        if not any(run.request_id in plan.released for run in membership.swapped_out):
            return
        state.body.end_copies()
    for request_id, first_block, end_block in membership.swapped_out:
        state.table.release_layers(request_id, first_block, end_block, NOTHING)
    membership.swapped_out = ()


def localize(
    state: InstanceState,
    change: Change,
    membership: Membership,
    plan: StepPlan,
    *,
    runs_ahead: bool = False,
) -> StepWork | None:
    """Take and name the blocks of a plan. What it frees is freed before, and once.

    None when the units are there, but scattered between blocks that are in transfer; or if a plan
    ``runs_ahead``, between any.
    """
    if membership.freed_step != plan.step_id:
        membership.freed_step = plan.step_id
        _free_blocks(state, change, membership, plan)
    table, blocks = state.table, state.spec.blocks
    block_size, holding = blocks.block_size, blocks.holding
    if plan.swapped_in:
        _make_room(state, plan)
    counts, row_of = table.counts, table.rows
    rows: list[int] = []
    for request_id, start, num_tokens, _ in plan.chunks:
        end = start + num_tokens
        # So many blocks hold so many tokens at least: what a ring's hold is asked for seldom.
        if counts.get(request_id, 0) * block_size < end:
            needed = holding(end)
            if counts.get(request_id, 0) < needed:
                copies = table.grow(request_id, needed, may_compact=not runs_ahead)
                if copies is None:
                    return None
                state.copy_units(copies)
        rows.append(row_of[request_id])
    if plan.swapped_out or plan.swapped_in:
        _start_host_copies(state, membership, plan)
    layers, scheduler = membership.layers, membership.scheduler
    token_ids = feeds = None
    if scheduler is not None:
        feeds = scheduler.feeds() if runs_ahead else None
        if feeds is None or feeds.min() < 0:
            token_ids = scheduler.token_ids_of(plan)
    return StepWork(
        plan=plan,
        layers=layers,
        is_first=layers.first == 0,
        is_last=layers.end == state.spec.num_layers,
        token_ids=token_ids,
        tables=table.tables,
        rows=np.array(rows, dtype=np.int32),
        shares_head=membership.head is not None,
        is_ahead=runs_ahead,
        feeds=feeds,
        feeds_on=None if feeds is None or scheduler is None else scheduler.feeds_on,
    )


def localize_ahead(
    state: InstanceState,
    change: Change,
    membership: Membership | None,
    now_s: float,
    device: RunsAhead,
) -> Work | None:
    """Localize the step behind the one that runs here, if that can be done while it does. The
    leader forms it.
    """
    assert state.is_running and not state.is_ahead
    if membership is None or membership.head is not None:
        return None
    scheduler, ready = membership.scheduler, membership.ready
    if scheduler is None:
        if not (ready and _is_light(membership, ready[0][0]) and device.reads_ahead(ready[0][1])):
            return None
    elif ready:
        return None
    elif (formed := scheduler.schedule_ahead(now_s, device.feeds_back)) is not None:
        ready.append((formed, None))
    else:
        return None
    plan, hidden = ready[0]
    step = localize(state, change, membership, plan, runs_ahead=True)
    if step is None:
        return None  # blocks must be packed for it first, while nothing runs
    ready.popleft()
    state.is_ahead = True
    return Work(step, hidden)


def _is_light(membership: Membership, plan: StepPlan) -> bool:
    """Whether nothing but the next step's own blocks changes for it."""
    moves = plan.released or plan.swapped_out or plan.swapped_in or membership.swapped_out
    return bool(plan.chunks) and not (moves or plan.scored)


def _make_room(state: InstanceState, plan: StepPlan) -> None:
    """Give every block that comes back from host memory units of its own."""
    for request_id, first_block, end_block in plan.swapped_in:
        copies = state.table.relayout(request_id, first_block, end_block)
        assert copies is not None, (plan, state.table.free_units)
        state.copy_units(copies)


def _start_host_copies(state: InstanceState, membership: Membership, plan: StepPlan) -> None:
    """Have the body copy, once every block of the plan has its place."""
    membership.swapped_out = plan.swapped_out
    state.body.swap_units(
        tuple(copy for run in plan.swapped_out for copy in _locate(state, membership, run)),
        tuple(copy for run in plan.swapped_in for copy in _locate(state, membership, run)),
        beside_step=bool(plan.chunks),
    )


def _locate(state: InstanceState, membership: Membership, run: BlockRun) -> Iterator[HostCopy]:
    """Where the run's blocks are: those that others share, then its own."""
    table, layers = state.table, membership.layers
    row, (request_id, first, end) = table.row_of(run.request_id), run
    border = min(end, max(first, table.loans.num_blocks(request_id)))
    for start, stop, is_shared in ((first, border, True), (border, end, False)):
        if start < stop:
            starts = table.tables[row, start:stop] + layers.first
            yield HostCopy(request_id, start, starts, layers.num_layers, is_shared)
