"""What went wrong in other systems, and the tests that keep it from going wrong here.

``TRAPS`` is the table, from trap to tests; those that no other module has are below.
"""

from pathlib import Path

import pytest

from kunserve.cluster.in_process import Delivery
from kunserve.core.ids import InstanceId
from tests.fake_cluster import FakeCluster

RACES = "unit/control/instance/test_agent_races.py"
FAULTS = "unit/control/instance/test_transition_faults.py"
GROUPS = "unit/control/instance/test_agent_groups.py"
HERE = "test_traps.py"

TRAPS: dict[str, list[tuple[str, str]]] = {
    "a restore while one request is larger than the restored pool": [
        ("unit/policy/test_restore.py", "test_a_request_larger_than_an_undropped_pool_postpones"),
        (RACES, "test_a_request_larger_than_one_pool_postpones_the_restore"),
        (RACES, "test_a_large_request_goes_where_it_will_fit"),
    ],
    "a failure in the middle of a drop": [
        (FAULTS, "test_the_controller_changes_its_mind"),
        (FAULTS, "test_a_member_says_no"),
        (FAULTS, "test_a_member_cannot"),
        (FAULTS, "test_a_member_does_not_answer"),
        (FAULTS, "test_a_member_is_lost"),
        (FAULTS, "test_memory_cannot_be_remapped"),
        (RACES, "test_death_in_every_phase_of_a_drop"),
    ],
    "memory counted both as weight and as KV": [
        ("unit/engine/test_arena.py", "test_no_granule_is_mapped_twice"),
        ("unit/engine/test_memory.py", "test_half_the_layers_become_kv_and_come_back"),
        ("unit/engine/test_memory.py", "test_the_promise_holds_for_any_shape_and_run"),
    ],
    "success that changed nothing": [
        (
            "unit/server/test_admin_and_health.py",
            "test_a_success_that_changed_nothing_is_a_failure",
        ),
        (
            GROUPS,
            "test_a_drop_moves_memory_and_capacity_is_the_minimum_over_stages",
        ),
        (RACES, "test_the_answer_to_a_load_tells_what_was_loaded"),
    ],
    "a group's KV is that of its scarcest stage": [
        ("unit/policy/test_drop_plan.py", "test_capacity_is_the_minimum_over_stages"),
        (GROUPS, "test_a_drop_moves_memory_and_capacity_is_the_minimum_over_stages"),
    ],
    "a burst inside one report period lands on one instance": [
        ("unit/policy/test_dispatch.py", "test_a_burst_inside_one_report_period_spreads"),
        (HERE, "test_a_burst_before_any_report_spreads_over_the_instances"),
    ],
    "all instances die, then one returns": [
        (HERE, "test_all_instances_dead_then_one_returns"),
        ("e2e/test_local_cluster.py", "test_all_instances_dead_then_one_returns"),
    ],
    "a client's mistakes count against the server": [
        ("unit/server/test_admin_and_health.py", "test_bad_requests_are_nobodys_failure"),
    ],
    "requests bound for an instance that leaves": [
        (HERE, "test_requests_on_their_way_to_an_instance_that_dies"),
        (RACES, "test_a_request_sent_to_an_old_leader_during_the_commit"),
        ("e2e/test_local_cluster.py", "test_a_killed_instance_costs_a_pause_only"),
    ],
    "decodes pack into one microbatch after a drain": [
        (
            "unit/control/group/test_scheduler.py",
            "test_decodes_do_not_pack_into_one_microbatch_after_a_drain",
        ),
        (GROUPS, "test_decodes_spread_over_microbatches"),
    ],
    "a preempted request loses its place": [
        (
            "unit/control/group/test_scheduler.py",
            "test_the_latest_arrival_is_preempted_and_keeps_its_place_and_output",
        ),
    ],
    "the peer with the only copy of a layer dies": [
        (HERE, "test_the_only_holder_of_a_layer_dies_while_it_gives_it"),
        ("unit/policy/test_restore.py", "test_a_layer_whose_only_holder_died_comes_from_disk"),
        (FAULTS, "test_layers_are_not_given"),
    ],
    "a token is lost when its request changes leaders": [
        (
            "unit/control/cluster/test_requests.py",
            "test_the_new_leaders_tokens_wait_for_the_old_leaders_last",
        ),
    ],
}


@pytest.mark.parametrize("trap", TRAPS)
def test_every_trap_has_its_tests(trap: str) -> None:
    for path, name in TRAPS[trap]:
        source = (Path(__file__).parent / path).read_text()
        assert f"def {name}(" in source, f"{path} has no {name}"


def test_a_burst_before_any_report_spreads_over_the_instances() -> None:
    cluster = FakeCluster(pools=(24, 24, 24))
    for _ in range(12):
        cluster.request(4, 4)
    for (src, dst), letters in cluster.links.items():
        if src is None and dst is not None:
            assert len(letters) == 4, dst
    cluster.finish()


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_all_instances_dead_then_one_returns(first: int, is_merged: bool) -> None:
    cluster = FakeCluster()
    if is_merged:
        cluster.drop((0, 0, 2), (1, 2, 4))
        cluster.run_until_idle()
    for _ in range(4):
        cluster.request(4, 6)
    cluster.run_except(lambda action: False, lambda: cluster.num_actions >= 30)
    for member in (0, 1):
        cluster.kill_instance(InstanceId(member))
    late = cluster.request(4, 6)
    cluster.run_except(lambda action: False)
    assert late in cluster.unfinished
    cluster.start_instance(InstanceId(first))
    cluster.finish()
    cluster.start_instance(InstanceId(1 - first))
    cluster.request(4, 6)
    cluster.finish()
    assert len(cluster.groups()) == 2


def test_requests_on_their_way_to_an_instance_that_dies() -> None:
    """Sent, not yet read: they run elsewhere, as do those that were running."""
    cluster = FakeCluster()
    for _ in range(4):
        cluster.request(4, 4)
    cluster.run_except(
        lambda action: action == Delivery(None, InstanceId(1)),
        lambda: cluster.num_actions >= 12,
    )
    assert cluster.links[None, InstanceId(1)], "nothing is on its way"
    cluster.kill_instance(InstanceId(1))
    cluster.finish()


def test_the_only_holder_of_a_layer_dies_while_it_gives_it() -> None:
    """Its pipeline is over; the survivor takes the layers from disk and runs every request."""
    cluster = FakeCluster(pools=(24, 24))
    cluster.drop((0, 0, 2), (1, 2, 4))
    cluster.run_until_idle()
    for _ in range(3):
        cluster.request(4, 6)
    cluster.run_except(lambda action: False, lambda: cluster.num_actions >= 30)
    (group,) = cluster.groups()
    cluster.restore(group)
    cluster.run_until(lambda: bool(cluster.members[InstanceId(0)].mover.pulls))
    cluster.kill_instance(InstanceId(1))
    cluster.finish()
    assert cluster.members[InstanceId(0)].body.held.num_layers == 4
