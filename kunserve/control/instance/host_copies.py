"""The instance's part in swapping: which units a plan's copies to and from host memory touch."""

from kunserve.control.instance.block_table import NOTHING
from kunserve.control.instance.body import HostCopy
from kunserve.control.instance.state import InstanceState
from kunserve.core.step import BlockRun, StepPlan


def free_stashed(seat: InstanceState) -> None:
    """The plan before has run here: what it copied out holds no units any more."""
    for request_id, first_block, end_block in seat.swapped_out:
        seat.table.release_layers(request_id, first_block, end_block, NOTHING)
    seat.swapped_out = ()


def make_room(seat: InstanceState, plan: StepPlan) -> None:
    """Give every block that comes back units of its own."""
    for request_id, first_block, end_block in plan.swapped_in:
        copies = seat.table.relayout(request_id, first_block, end_block)
        assert copies is not None, (plan, seat.table.free_units)
        if copies:
            seat.body.copy_units(copies)


def start_copies(seat: InstanceState, plan: StepPlan) -> None:
    """Have the body copy, once every block of the plan has its place."""
    seat.swapped_out = plan.swapped_out
    seat.body.swap_units(
        tuple(_located(seat, run) for run in plan.swapped_out),
        tuple(_located(seat, run) for run in plan.swapped_in),
        beside_step=bool(plan.chunks),
    )


def _located(seat: InstanceState, run: BlockRun) -> HostCopy:
    table, layers = seat.table, seat.layers
    entries = table.tables[table.row_of(run.request_id), run.first_block : run.end_block]
    return HostCopy(run.request_id, run.first_block, entries + layers.first, layers.num_layers)
