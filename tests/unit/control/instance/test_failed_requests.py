"""A request whose token cannot be chosen ends with an error; its neighbours notice nothing."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kunserve.control.instance.body import StepWork
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.request import FinishReason, Request, SamplingParams
from kunserve.core.step import SampledToken
from kunserve.core.tokens import TokenIds
from kunserve_lab.world.fake_body import FakeBody
from tests.fake_cluster import FakeCluster


@pytest.mark.parametrize(("num_prompt", "max_model_len"), [(25, 1000), (20, 20)])
def test_what_a_leader_cannot_hold_ends_alone(num_prompt: int, max_model_len: int) -> None:
    """Admission lets none through; before, one that came all the same ended the instance."""
    cluster = FakeCluster(pools=(12, 12), max_model_len=max_model_len)
    names = [cluster.request(4, 7) for _ in range(3)]
    for leader in map(InstanceId, range(2)):
        request_id = RequestId(f"long{leader}")
        prompt = TokenIds(range(num_prompt))
        request = Request(request_id, prompt, SamplingParams(max_tokens=9), 0.0)
        cluster.submit(request)
        requests = cluster.controller._requests
        live = requests._live[request_id]
        if live.leader is None:  # nobody has room, as far as the controller knows
            (group,) = [
                g for g in cluster.controller.placement.groups.values() if g.layout.leader == leader
            ]
            requests.backlog.remove(live)
            requests._send(live, group, 1)
            cluster.carry_out()
    cluster.run_until_idle()
    cluster.check_empty()
    for number in range(2):
        account = cluster.accounts.pop(RequestId(f"long{number}"))
        assert account.end is FinishReason.ERROR and not account.token_ids
    assert all(cluster.accounts[name].end is FinishReason.LENGTH for name in names)
    cluster.prove_tokens()


@pytest.mark.parametrize("is_pipeline", [False, True])
@pytest.mark.parametrize("fails_at", [0, 3])
def test_one_request_fails_alone(
    monkeypatch: pytest.MonkeyPatch, is_pipeline: bool, fails_at: int
) -> None:
    cluster = FakeCluster()
    if is_pipeline:
        cluster.drop((0, 0, 2), (1, 2, 4))
        cluster.run_until_idle()
    names = [cluster.request(4, 7) for _ in range(5)]
    bad = names[2]
    counts = dict.fromkeys(names, 0)
    sample = FakeBody._sample

    def spoilt(
        body: FakeBody, work: StepWork, hidden: npt.NDArray[np.uint64]
    ) -> Iterator[SampledToken]:
        for token in sample(body, work, hidden):
            counts[token.request_id] += 1
            fails = token.request_id == bad and counts[bad] > fails_at
            yield token._replace(token_id=None) if fails else token

    monkeypatch.setattr(FakeBody, "_sample", spoilt)
    cluster.run_until_idle()
    cluster.check_empty()
    ended = cluster.accounts.pop(bad)
    assert ended.end is FinishReason.ERROR and len(ended.token_ids) == fails_at
    cluster.prove_tokens()
