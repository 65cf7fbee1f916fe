"""Pairs that do not reach each other: kept apart for a while, longer each time, and told."""

import pytest

from kunserve.control.cluster import cut_links
from kunserve.control.cluster.cut_links import FIRST_HOLD_S, MOST_TOLD, CutLinks
from kunserve.control.cluster.holds import LONGEST_HOLD_S
from kunserve.core.ids import InstanceId
from kunserve.core.messages import LateContact, LinkBroken, Prepared
from tests.fake_cluster import FakeCluster

ZERO, ONE, TWO = (InstanceId(i) for i in range(3))


def test_a_pair_is_kept_apart_for_a_while_that_doubles() -> None:
    cuts = CutLinks()
    now_s, hold_s = 100.0, FIRST_HOLD_S
    while hold_s <= 2 * LONGEST_HOLD_S:
        cuts.found(ONE, ZERO, now_s)
        cuts.found(ZERO, ONE, now_s)  # the other end says so too
        held_s = min(hold_s, LONGEST_HOLD_S)
        assert cuts.pairs(now_s + held_s) == ((ZERO, ONE),)
        assert cuts.pairs(now_s + held_s + 0.1) == ()
        now_s += held_s + 0.1
        hold_s *= 2
    now_s += 3 * LONGEST_HOLD_S
    cuts.found(ZERO, ONE, now_s)
    assert cuts.pairs(now_s + FIRST_HOLD_S + 0.1) == (), "long ago is forgotten"


def test_who_joins_or_dies_is_kept_apart_no_more() -> None:
    cuts = CutLinks()
    for pair in ((ZERO, ONE), (ONE, TWO), (ZERO, TWO)):
        cuts.found(*pair, 0.0)
    cuts.joined((TWO, ONE))
    assert cuts.pairs(1.0) == ((ZERO, ONE), (ZERO, TWO))
    cuts.forget(ONE)
    assert cuts.pairs(1.0) == ((ZERO, TWO),)


def test_pairs_are_bounded_and_told_in_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_links, "MOST_PAIRS", 20)
    cuts = CutLinks()
    for number in range(1, 50):
        cuts.found(ZERO, InstanceId(number), float(number))
        cuts.check()
    assert len(cuts.pairs(49.0)) == 20 and (ZERO, InstanceId(49)) in cuts.pairs(49.0)
    assert len(cuts.reason_texts(49.0)) == MOST_TOLD + 1


def four() -> FakeCluster:
    cluster = FakeCluster(pools=(12, 12, 12, 12))
    for _ in range(3):
        cluster.request(6, 9)
    cluster.finish()
    return cluster


def test_a_drop_merges_whom_no_cut_parts() -> None:
    cluster = four()
    controller = cluster.controller
    for one, other in ((0, 1), (0, 2), (3, 1)):
        controller.on(
            InstanceId(one),
            LinkBroken(InstanceId(one), InstanceId(other), "cut", is_down=True),
            cluster.now_s,
        )
    cluster.finish()
    state = controller.state(cluster.now_s)
    assert [(c.one, c.other) for c in state.cut_links] == [(0, 1), (0, 2), (1, 3)]
    assert "instances 0 and 1 do not reach each other" in state.reasons[0]
    assert controller.force_drop(1 << 40, cluster.now_s)
    cluster.carry_out()
    cluster.finish()
    groups = sorted(sorted(group.members) for group in cluster.groups())
    assert groups == [[0, 3], [1, 2]], "all four do not fit together either"


def test_a_first_contact_that_was_only_slow_parts_nobody() -> None:
    """As often as it is: the pair is free as soon as it has met."""
    cluster = FakeCluster()
    for _ in range(5):
        cluster.controller.on(ZERO, LinkBroken(ZERO, ONE, "late", is_down=True), cluster.now_s)
        (cut,) = cluster.controller.state(cluster.now_s).cut_links
        assert cut.until_s == cluster.now_s + FIRST_HOLD_S
        cluster.controller.on(ZERO, LateContact(ZERO, ONE), cluster.now_s + 1.0)
        assert not cluster.controller.state(cluster.now_s).cut_links
        cluster.pass_time(FIRST_HOLD_S + 1.0)


def test_by_hand_a_cut_may_be_tried_and_the_refusal_counts() -> None:
    cluster = FakeCluster()
    cluster.request(6, 9)
    cluster.finish()
    controller = cluster.controller
    controller.on(ZERO, LinkBroken(ZERO, ONE, "cut", is_down=True), cluster.now_s)
    cluster.finish()
    (transition_id,) = controller.force_drop(None, cluster.now_s)
    refusal = Prepared(transition_id, ZERO, "no connection to instances [1]", (ONE,))
    controller.on(ZERO, refusal, cluster.now_s + 1.0)
    assert controller.state(cluster.now_s).cut_links[0].until_s == cluster.now_s + 31.0


def test_a_commit_shows_that_a_link_is_whole() -> None:
    cluster = FakeCluster()
    cluster.request(6, 9)
    cluster.finish()
    cluster.controller.on(ZERO, LinkBroken(ZERO, ONE, "cut", is_down=True), cluster.now_s)
    cluster.finish()
    assert cluster.controller.force_drop(None, cluster.now_s)
    cluster.carry_out()
    cluster.finish()
    assert len(cluster.groups()) == 1
    assert not cluster.controller.state(cluster.now_s).cut_links
