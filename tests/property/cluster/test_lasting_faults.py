"""Lives in which faults last: every wait ends, and whoever is whole serves on.

Disks that hang, transfers of which nothing comes, instances that do not reach each other or never
come back, fronts that some learn of late; among shared beginnings, parking, guesses, poison and
ranks. Groups change by order, or by the real monitor's. Fair time passes between harms, and no
group, suspect, restore, transition or migration may wait in it for longer than it may
(``tests.liveness``). At the end everything is mended, or the faults go on: then all requests end
with their tokens all the same.
"""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.control.cluster import forming
from kunserve.core.ids import InstanceId
from tests.chaos_cluster import LONG_TURN_S, ChaosCluster, play
from tests.chaos_events import Happening, Setting
from tests.chaos_schedules import (
    BY_HAND,
    CLIENTS,
    DEATHS,
    DISKS,
    FRONTS,
    LINKS,
    SIZE,
    by_hand,
    by_monitor,
    lives,
)

NUM_LIVES = int(os.environ.get("CHAOS_SCHEDULES", "12")) // 2
"""Of each machine; ``make chaos-sim`` asks for many."""
EVERYTHING = (*DEATHS, *CLIENTS, *FRONTS, *LINKS, *DISKS, *SIZE)
BY_ORDER = (*EVERYTHING, *BY_HAND, "migrate")
BY_ITSELF = (*EVERYTHING, "call off", "reset cache")

pytestmark = pytest.mark.timeout(600 + 4 * NUM_LIVES)  # a failure takes minutes to shrink


def live(setting: Setting, life: list[Happening], is_mended: bool) -> None:
    """Play it to its end, however that is."""
    cluster = ChaosCluster(setting)
    play(cluster, life)
    if is_mended:
        cluster.heal()
        cluster.finish()
    else:
        cluster.outlive()


@settings(max_examples=NUM_LIVES)
@given(by_hand(), lives(BY_ORDER), st.booleans())
def test_groups_change_by_hand_while_everything_goes_wrong(
    setting: Setting, life: list[Happening], is_mended: bool
) -> None:
    live(setting, life, is_mended)


@settings(max_examples=NUM_LIVES)
@given(by_monitor(), lives(BY_ITSELF), st.booleans())
def test_the_monitor_changes_groups_while_everything_goes_wrong(
    setting: Setting, life: list[Happening], is_mended: bool
) -> None:
    live(setting, life, is_mended)


@pytest.mark.parametrize("condemns", [True, False])
def test_a_wait_that_nobody_ends_is_found(condemns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk hangs from which alone a survivor can get its layers."""
    if not condemns:
        monkeypatch.setattr(forming, "PATIENCE_S", 1e9)
    cluster = ChaosCluster(Setting(2))
    cluster.drop((0, 0, 2), (1, 2, 4))
    cluster.run_until(lambda: bool(cluster.records))
    cluster.request(4, 8)
    cluster.bad_disks.add(InstanceId(0))
    cluster.kill_instance(InstanceId(1))
    if condemns:
        cluster.endure(150.0, LONG_TURN_S)
        assert cluster.dead == [InstanceId(0)]
        cluster.outlive()
        return
    with pytest.raises(AssertionError, match=r"group \d forms for"):
        cluster.endure(150.0, LONG_TURN_S)
