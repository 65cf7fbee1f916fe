"""A survivor forms anew after a death (paper 4.4)."""

import pytest

from kunserve.cluster.fake import FakeBody
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from tests.fake_cluster import FakeCluster


@pytest.mark.parametrize(
    ("victim", "missing"), [(1, LayerRange(2, 4)), (0, LayerRange(0, 2))], ids=["lower", "upper"]
)
def test_a_survivor_loads_only_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, victim: int, missing: LayerRange
) -> None:
    cluster = FakeCluster()
    cluster.drop((0, 0, 2), (1, 2, 4))
    cluster.run_until_idle()
    names = [cluster.request(4, 7) for _ in range(3)]
    survivor = cluster.agent(1 - victim).state.body
    loaded: list[LayerRange] = []
    load_layers = FakeBody.load_layers

    def note(body: FakeBody, layers: LayerRange) -> None:
        if body is survivor:
            loaded.append(layers)
        load_layers(body, layers)

    monkeypatch.setattr(FakeBody, "load_layers", note)
    cluster.kill_instance(InstanceId(victim))
    cluster.finish()
    assert loaded == [missing]
    assert all(cluster.accounts[name].token_ids for name in names)
