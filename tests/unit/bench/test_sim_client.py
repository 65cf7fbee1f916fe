"""The simulated client: which responses count as completed."""

from unittest.mock import Mock

import pytest

from kunserve.bench.compare.simulated.sim_client import SimClient
from kunserve.core.ids import RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.request import FinishReason, Request
from kunserve.sim.events import EventHeap
from kunserve.workload.workload import Lengths, Workload


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
