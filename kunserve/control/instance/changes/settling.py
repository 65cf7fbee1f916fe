"""What an instance does with its blocks at a change of groups, before anything moves.

What nobody keeps is freed, unshared blocks of the prefix cache among it. A prefix that several new
groups want is copied for them, so that afterwards each moves, or stays, by itself.
"""

from kunserve.control.instance.state import InstanceState
from kunserve.core.ids import GroupId
from kunserve.policy.exchange.moves import MovePlan


def settle(state: InstanceState, plan: MovePlan, group_id: GroupId) -> None:
    """Free and copy; ``group_id`` is the instance's new group."""
    table = state.table
    moves = {move.request_id: move for move in plan.moves}
    staying = []
    for holder in table.request_ids():
        move = moves.get(holder)
        is_here = move is not None and move.new.group_id == group_id
        if is_here:
            staying.append(holder)
        else:
            table.loans.cut(holder, 0)
        if move is None or not (is_here or move.num_own):
            table.release(holder)
        state.body.forget(holder)
    here = [prefix for prefix in plan.prefixes if prefix.old.prefix_id in table.rows]
    for prefix_id, old, _ in here:
        if prefix_id == old.prefix_id:
            table.evict(prefix_id, old.end_block)
    for prefix_id, old, _ in here:
        if prefix_id != old.prefix_id:
            copies = table.copy(old.prefix_id, prefix_id, old.first_block, old.end_block)
            assert copies is not None, "the plan left room for copies"
            state.copy_units(copies)
    table.change_loans(
        staying, {p.old.prefix_id: p.prefix_id for p in here if p.new_group == group_id}
    )
