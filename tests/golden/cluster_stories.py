"""Twelve things that happen to a cluster of fake instances, and a drop and a restore by hand.

Each is played with real brains over bodies that prove every token. What the brains say to each
other is kept, so that whoever moves a decision sees whether it is still the same one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from kunserve.core.ids import InstanceId
from kunserve.core.layout import GroupLayout
from kunserve.core.plan import SwapPlan
from kunserve.core.transfer import KvPull
from kunserve_lab.world.actions import Action, CompletePull, Delivery, StartStep
from tests.fake_cluster import link
from tests.golden.told_cluster import ToldCluster

ZERO, ONE, TWO = (InstanceId(i) for i in range(3))
PAIR = ((0, 0, 2), (1, 2, 4))
"""Two instances of a model with four layers, as a pipeline."""


class ClusterStory(NamedTuple):
    """What is done, and to which cluster."""

    play: Callable[[ToldCluster], None]
    settings: dict[str, Any]
    shows: tuple[str, ...]
    """Parts of lines of the log, in this order: without them the story is not told."""


# Parts of stories


def _is_pull(action: Action) -> bool:
    return isinstance(action, CompletePull)


def _is_step(action: Action) -> bool:
    return isinstance(action, StartStep)


def _busy(cluster: ToldCluster, num_requests: int = 4, num_actions: int = 24) -> None:
    """Requests that are under way."""
    for number in range(num_requests):
        cluster.request(4 + number, 14)
    cluster.some(num_actions)


def _until_over(cluster: ToldCluster, number: int) -> None:
    """Until so many transitions have ended."""
    cluster.run_until(lambda: len(cluster.records) == number)


def _pipeline(cluster: ToldCluster) -> GroupLayout:
    """The only group with more than one stage."""
    (group,) = (group for group in cluster.groups() if len(group.stages) > 1)
    return group


def _finish(cluster: ToldCluster) -> None:
    cluster.chapter("to the end")
    cluster.finish()


# The stories


def _drop(cluster: ToldCluster) -> None:
    _busy(cluster)
    cluster.chapter("drop")
    cluster.drop(*PAIR)
    _finish(cluster)


def _deep_drop(cluster: ToldCluster) -> None:
    _busy(cluster, 3)
    cluster.chapter("drop of two")
    cluster.drop((0, 0, 3), (1, 3, 6))
    _until_over(cluster, 1)
    cluster.chapter("drop of the pair and a third")
    cluster.drop((0, 0, 2), (2, 2, 4), (1, 4, 6))
    _finish(cluster)


def _restore(cluster: ToldCluster) -> None:
    cluster.drop(*PAIR)
    cluster.run_until_idle()
    _busy(cluster, 3)
    cluster.chapter("restore")
    cluster.restore(_pipeline(cluster))
    _finish(cluster)


def _restore_called_off(cluster: ToldCluster) -> None:
    cluster.drop(*PAIR)
    cluster.run_until_idle()
    _busy(cluster, 3)
    cluster.chapter("restore, of which one instance has its layers")
    restore_id = cluster.restore(_pipeline(cluster))
    cluster.run_except(
        lambda action: _is_pull(action) and action == CompletePull(ONE, 0),
        lambda: cluster.agent(0).state.held.num_layers == 4 and bool(_pulls(cluster, ONE)),
    )
    cluster.chapter("called off")
    assert cluster.roll_back(restore_id)
    _finish(cluster)


def _pulls(cluster: ToldCluster, instance_id: InstanceId) -> int:
    return len(cluster.members[instance_id].mover.pulls)


def _death_before_commit(cluster: ToldCluster) -> None:
    _busy(cluster)
    cluster.chapter("drop, of which one instance is not told yet")
    cluster.drop(*PAIR)
    cluster.run_except(lambda a: link(None, 1)(a) or _is_step(a))
    cluster.chapter("the other one dies")
    cluster.kill_instance(ZERO)
    cluster.some(40)
    cluster.start_instance(ZERO)
    _finish(cluster)


def _death_after_commit(cluster: ToldCluster) -> None:
    _busy(cluster)
    cluster.chapter("drop, until its exchange")
    cluster.drop(*PAIR)
    cluster.run_except(_is_pull)
    assert cluster.agent(0).is_exchanging
    cluster.chapter("an instance dies")
    cluster.kill_instance(ONE)
    cluster.some(40)
    cluster.start_instance(ONE)
    _finish(cluster)


def _exchange_with_abort(cluster: ToldCluster) -> None:
    _busy(cluster)
    cluster.chapter("drop, until its exchange")
    cluster.drop(*PAIR)
    cluster.run_except(_is_pull)
    assert cluster.agent(0).is_exchanging and cluster.agent(1).is_exchanging
    cluster.chapter("clients go away")
    for request_id in cluster.unfinished[:2]:
        cluster.cancel(request_id)
    cluster.chapter("a pull fails")
    wanted = [pull.what for pull in cluster.members[ZERO].mover.pulls]
    kv = [one.request_id if isinstance(one, KvPull) else None for one in wanted]
    index = next(i for i, one in enumerate(kv) if one in cluster.unfinished)
    cluster.perform(CompletePull(ZERO, index, fails=True))
    _finish(cluster)


def _prefixes_moved(cluster: ToldCluster) -> None:
    cluster.kill_instance(ONE)
    cluster.request(11, 9, num_common=8)
    cluster.run_until(lambda: all(one.token_ids for one in cluster.accounts.values()))
    cluster.chapter("two more with the same beginning")
    for _ in range(2):
        cluster.request(11, 9, num_common=8)
    cluster.run_until(lambda: all(len(one.token_ids) >= 2 for one in cluster.accounts.values()))
    cluster.start_instance(ONE)
    cluster.run_except(_is_step, lambda: cluster.agent(1).membership is not None)
    cluster.chapter("drop")
    cluster.drop(*PAIR)
    _until_over(cluster, 1)
    cluster.chapter("one more, and the cache is reset")
    cluster.request(11, 2, num_common=8)
    cluster.run_until_idle()
    cluster.reset_prefix_cache()
    cluster.request(11, 1, num_common=8)
    _finish(cluster)


def _park(cluster: ToldCluster) -> None:
    for _ in range(3):
        cluster.request(5, 14)
    cluster.some(30)
    cluster.chapter("nothing is left to drop")
    (group,) = cluster.groups()
    cluster.allow_parking(group)
    for _ in range(2):
        cluster.request(9, 6)
    _finish(cluster)


def _front_restart(cluster: ToldCluster) -> None:
    cluster.drop(*PAIR)
    cluster.run_until_idle()
    _busy(cluster, 4)
    cluster.chapter("the front dies, with a pipeline and a single instance")
    cluster.restart_front()
    cluster.some(30)
    cluster.chapter("requests of the new front")
    for _ in range(3):
        cluster.request(6, 5)
    cluster.some(20)
    cluster.chapter("another front, and mail is lost")
    cluster.restart_front(loses_mail=True)
    cluster.request(6, 5)
    _finish(cluster)


def _scale(cluster: ToldCluster) -> None:
    _busy(cluster, 4)
    cluster.chapter("two shall be enough")
    cluster.resize(2)
    cluster.run_until(lambda: bool(cluster.given_back))
    cluster.chapter("three again")
    cluster.resize(3)
    cluster.start_ordered(cluster.given_back[0])
    for _ in range(4):
        cluster.request(5, 5)
    _finish(cluster)


def _cut_link(cluster: ToldCluster) -> None:
    _busy(cluster)
    cluster.chapter("drop, and the link is cut when it is committed")
    cluster.drop(*PAIR)
    cluster.run_except(lambda action: action in (Delivery(ZERO, ONE), Delivery(ONE, ZERO)))
    cluster.cuts.add((ZERO, ONE))
    cluster.some(20)
    cluster.chapter("both ends see it")
    cluster.notice(loses=True)
    cluster.run_until_idle()
    cluster.heal()
    cluster.chapter("an instance is cut off from the front")
    for _ in range(3):
        cluster.request(5, 6)
    cluster.some(20)
    cluster.cuts.add((TWO, None))
    cluster.some(10)
    cluster.notice(loses=True)
    cluster.run_until_idle()
    cluster.heal()
    cluster.request(5, 4)
    _finish(cluster)


def _by_hand(cluster: ToldCluster) -> None:
    _busy(cluster, 3)
    cluster.pass_time(0.1)
    cluster.chapter("drop as much as can be")
    assert cluster.controller.force_drop(1 << 40, cluster.now_s)
    cluster.carry_out()
    cluster.run_until(lambda: bool(cluster.records) and not cluster.controller.transitions.active)
    cluster.chapter("no more can be dropped")
    assert not cluster.controller.force_drop(None, cluster.now_s)
    cluster.run_until_idle()
    cluster.pass_time(0.1)
    cluster.run_until_idle()
    cluster.request(5, 6)
    cluster.some(12)
    cluster.chapter("restore")
    assert cluster.controller.force_restore(cluster.now_s)
    cluster.carry_out()
    _finish(cluster)


_THREE = {"pools": (12, 12, 12)}
CLUSTER_STORIES = {
    "drop": ClusterStory(_drop, {}, ("prepare", "commit", "handover", "pull", "drop 0 done")),
    "deep_drop": ClusterStory(
        _deep_drop, {"num_layers": 6, "pools": (12, 12, 12)}, ("drop 0 done", "drop 1 done")
    ),
    "restore": ClusterStory(
        _restore, {}, ("drop 0 done", "pull weights", "handover", "restore 1 done")
    ),
    "restore_called_off": ClusterStory(
        _restore_called_off,
        {},
        ("load 1", "restore 1 rolled back", "roll back 1", "layers dropped"),
    ),
    "death_before_commit": ClusterStory(
        _death_before_commit,
        {},
        ("prepared 0", "0 dies", "drop 0 rolled back", "0 starts", "form", "end r3"),
    ),
    "death_after_commit": ClusterStory(
        _death_after_commit, {}, ("committed 0", "1 dies", "again", "drop 0 failed", "end r")
    ),
    "exchange_with_abort": ClusterStory(
        _exchange_with_abort, {}, ("goes away", "fails", "lost r", "drop 0 done")
    ),
    "prefixes_moved": ClusterStory(
        _prefixes_moved,
        {"pools": (40, 40), "layer_units": 60},
        ("shares", "handover", "(prefix", "drop 0 done", "shares", "reset"),
    ),
    "park": ClusterStory(
        _park,
        {"pools": (14,), "swap": SwapPlan(1e7, max_park_s=0.5, is_second_line=True)},
        ("allow parking", "to host r", "from host r"),
    ),
    "front_restart": ClusterStory(
        _front_restart, _THREE, ("rejoin: g", "form", "formed", "rejoin: g", "end")
    ),
    "scale": ClusterStory(_scale, _THREE, ("scale down 2", "scale up", "2 starts", "formed")),
    "cut_link": ClusterStory(_cut_link, _THREE, ("broken", "failed", "respawn 2", "2 starts")),
    "by_hand": ClusterStory(
        _by_hand,
        {"num_layers": 6, "pools": (12, 12, 12), "layer_units": 60},
        ("drop 0 done", "no more", "restore", "done"),
    ),
}
