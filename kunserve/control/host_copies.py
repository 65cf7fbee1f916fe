"""The instance's part in swapping: which units a plan's copies to and from host memory touch."""

from kunserve.control.block_table import NOTHING
from kunserve.control.body import HostCopy
from kunserve.control.seat import Seat
from kunserve.core.step import BlockRun, StepPlan


def free_stashed(seat: Seat) -> None:
    """The plan before has run here: what it copied out holds no units any more."""
    for request_id, first_block, end_block in seat.stashed:
        seat.table.release_layers(request_id, first_block, end_block, NOTHING)
    seat.stashed = ()


def make_room(seat: Seat, plan: StepPlan) -> None:
    """Give every block that comes back units of its own."""
    for request_id, first_block, end_block in plan.fetched:
        copies = seat.table.relayout(request_id, first_block, end_block)
        assert copies is not None, (plan, seat.table.free_units)
        if copies:
            seat.body.copy_units(copies)


def start_copies(seat: Seat, plan: StepPlan) -> None:
    """Have the body copy, once every block of the plan has its place."""
    seat.stashed = plan.stashed
    seat.body.swap_units(
        tuple(_located(seat, run) for run in plan.stashed),
        tuple(_located(seat, run) for run in plan.fetched),
        beside_step=bool(plan.chunks),
    )


def _located(seat: Seat, run: BlockRun) -> HostCopy:
    table, layers = seat.table, seat.layers
    entries = table.tables[table.row_of(run.request_id), run.first_block : run.end_block]
    return HostCopy(run.request_id, run.first_block, entries + layers.first, layers.num_layers)
