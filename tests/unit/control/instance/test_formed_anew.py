"""A survivor forms anew after a death (paper 4.4)."""

import pytest

from kunserve.core.ids import InstanceId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.messages import Form, Submit
from kunserve.core.transfer import LayerLoad, LayerPull
from kunserve_lab.world.actions import Action, CompletePull, Delivery, FinishStep, StartStep
from kunserve_lab.world.fake_body import FakeBody
from tests.fake_cluster import FakeCluster, link


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


def is_layer_pull(action: Action) -> bool:
    return isinstance(action, CompletePull)


def bereaved(victim: int = 1) -> FakeCluster:
    """Of a pipeline of two one instance has died; a third one holds the whole model."""
    cluster = FakeCluster(pools=(12, 12, 12))
    cluster.drop((0, 0, 2), (1, 2, 4))
    cluster.run_until_idle()
    for _ in range(4):
        cluster.request(4, 7)
    cluster.kill_instance(InstanceId(victim))
    return cluster


def test_layers_come_from_a_peer_that_holds_them() -> None:
    cluster = bereaved()
    mover = cluster.members[InstanceId(0)].mover
    cluster.run_except(is_layer_pull)
    assert [pull.what for pull in mover.pulls] == [LayerPull(LayerRange(2, 4), InstanceId(2))]
    cluster.finish()


def test_the_disk_gives_what_a_peer_cannot() -> None:
    cluster = bereaved()
    mover = cluster.members[InstanceId(0)].mover
    cluster.run_except(is_layer_pull)
    cluster.perform(CompletePull(InstanceId(0), 0, fails=True))
    assert [pull.what for pull in mover.pulls] == [LayerLoad(LayerRange(2, 4))]
    cluster.finish()


def test_no_request_comes_before_the_layers_are_there_and_mail_is_read() -> None:
    cluster = bereaved()
    survivor = cluster.agent(0)
    cluster.run_except(is_layer_pull)
    late = [cluster.request(4, 3) for _ in range(6)]
    cluster.cancel(late.pop())
    cluster.run_except(is_layer_pull)
    assert survivor.membership is None and not survivor.inbox.waiting
    assert all(cluster.accounts[name].end is not None for name in late), "the third one serves"
    cluster.finish()
    assert survivor.membership is not None
    assert cluster.controller.state(0.0).instances[0].held == LayerRange(0, 4)


def test_a_group_formed_anew_while_its_layers_are_on_their_way() -> None:
    """A front that takes over may have an instance form again, at any moment."""
    cluster = bereaved()
    member = cluster.members[InstanceId(0)]
    cluster.run_except(is_layer_pull)
    layout = GroupLayout(
        cluster.controller.placement.new_ids(1), (Stage(InstanceId(0), LayerRange(0, 2)),)
    )
    spec = cluster.controller.placement.specs[InstanceId(0)]
    member.agent.on(Form(layout, (spec,)), cluster.now_s)
    assert not member.mover.pulls
    assert member.agent.membership is not None and member.agent.membership.layout == layout
    assert member.body.held == member.agent.state.held == member.mover.offered == LayerRange(0, 2)
    assert member.agent.state.table.num_units == member.body.kv_units
    member.agent.check()


def test_a_request_that_a_form_sweeps_away_is_counted_as_read() -> None:
    """Else the group would look for ever as if the request were on its way there."""
    cluster = FakeCluster()
    for _ in range(2):
        cluster.request(4, 7)
    to_it, it = link(None, 1), InstanceId(1)
    cluster.run_except(
        lambda action: action == FinishStep(it), lambda: cluster.members[it].work is not None
    )
    cluster.drop((0, 0, 2), (1, 2, 4))
    while cluster.links[None, it]:
        cluster.perform(Delivery(None, it))  # up to ``Prepare``
    for _ in range(2):
        cluster.request(4, 7)
    # Instance 0 commits and hands over, before instance 1 reads what came before its own commit.
    steps = (StartStep(it), FinishStep(it))
    cluster.perform(Delivery(it, None))
    cluster.run_except(lambda action: to_it(action) or action in steps)
    cluster.perform(Delivery(None, it))
    (waiting,) = cluster.agent(1).inbox.waiting
    assert isinstance(waiting, Submit)
    cluster.kill_instance(InstanceId(0))
    cluster.run_except(lambda action: action in steps)  # the step ends after the ``Form``
    cluster.finish()
    cluster.pass_time(0.1)
    cluster.run_until_idle()
    (group,) = cluster.controller.placement.groups.values()
    assert not group.unreported and group.is_clear
