"""The simulated client: which responses count as completed, and when it stops waiting."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from kunserve.core.ids import RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.request import FinishReason, Request
from kunserve_lab.compare.simulated.sim_client import STALL_S, SimClient
from kunserve_lab.sim.events import EventHeap
from kunserve_lab.workload.workload import Lengths, Workload
from tests.lab.sim.worlds import run, scenario


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (FinishReason.LENGTH, None),
        (FinishReason.STOP, None),
        (FinishReason.ERROR, "ended by error"),
        (FinishReason.ABORT, "ended by abort"),
    ],
)
def test_a_response_that_was_broken_off_has_failed(reason: FinishReason, error: str | None) -> None:
    heap = EventHeap()
    workload = Workload((0.0,), Lengths((3,), (5,), "one"), "one")
    client = SimClient(heap, workload, 0.0, lambda record: None)
    cluster = Mock()
    cluster.profile.max_model_len = 100
    cluster.controller.admit.return_value = None
    cluster.submit.side_effect = lambda request: answer(client, request, reason)
    client.begin(cluster)
    heap.step()
    (record,) = client.records
    assert (record.error, record.finish_reason) == (error, str(reason))
    assert len(record.token_times_s) == 1 and client.num_left == 0


def answer(client: SimClient, request: Request, reason: FinishReason) -> None:
    """One token, then the end."""
    name = RequestId(request.request_id)
    client.received(TokenOutput(name, 0, 7, None, None))
    client.received(TokenOutput(name, 1, None, None, reason))


def test_a_cluster_that_rests_has_not_stalled() -> None:
    far = Workload(
        (0.0, STALL_S + 100.0, STALL_S + 110.0), Lengths((50,) * 3, (5,) * 3, "x"), "far"
    )
    records = run("recompute", scenario(far, num_instances=1)).run.records
    assert [record.error for record in records] == [None, None, None]


@pytest.mark.parametrize(
    ("gap_s", "error"), [(STALL_S / 6, None), (STALL_S + 1.0, f"no token for {STALL_S:.0f} s")]
)
def test_only_a_client_that_hears_nothing_gives_up(gap_s: float, error: str | None) -> None:
    """An answer of eight tokens takes longer than a stall may, if each of them comes in time."""
    heap = EventHeap()
    workload = Workload((0.0, 1.0), Lengths((3, 3), (8, 8), "two"), "two")
    client = SimClient(heap, workload, 0.0, lambda record: None)
    cluster = Mock()
    cluster.profile.max_model_len = 100
    cluster.controller.admit.return_value = None
    cluster.controller.state.return_value = SimpleNamespace(
        loads=(), instances=(), num_waiting=0, num_drops=0, num_restores=0
    )

    def submit(request: Request) -> None:
        for number in range(8):
            reason = FinishReason.LENGTH if number == 7 else None
            token = TokenOutput(request.request_id, number, 7, None, reason)
            heap.after((number + 1) * gap_s, client.received, token)

    cluster.submit.side_effect = submit
    client.begin(cluster)
    while client.num_left:
        heap.step()
    assert [record.error for record in client.records] == [error, error]
