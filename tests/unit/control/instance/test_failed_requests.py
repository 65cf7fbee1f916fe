"""A request whose token cannot be chosen ends with an error; its neighbours notice nothing."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kunserve.control.instance.body import StepWork
from kunserve.core.request import FinishReason
from kunserve.core.step import SampledToken
from kunserve_lab.world.fake_body import FakeBody
from tests.fake_cluster import FakeCluster


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
