"""What went wrong in other systems, and the tests that keep it from going wrong here.

``TRAPS``, at the end, is the table from trap to tests; those that no other module has are here.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable

import pytest

from kunserve.core.ids import InstanceId
from kunserve_lab.world.actions import Delivery
from tests.e2e.processes import test_local_cluster
from tests.fake_cluster import FakeCluster
from tests.unit.control.cluster.requests import test_requests
from tests.unit.control.group import test_scheduler
from tests.unit.control.instance import test_agent_groups, test_agent_races, test_transition_faults
from tests.unit.engine.memory import test_arena, test_memory
from tests.unit.policy.dispatch import test_dispatch
from tests.unit.policy.drop import test_drop_plan, test_restore
from tests.unit.server import test_admin_and_health


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


TRAPS: dict[str, list[Callable[..., None]]] = {
    "a restore while one request is larger than the restored pool": [
        test_restore.test_a_request_larger_than_an_undropped_pool_postpones,
        test_agent_races.test_a_request_larger_than_one_pool_postpones_the_restore,
        test_agent_races.test_a_large_request_goes_where_it_will_fit,
    ],
    "a failure in the middle of a drop": [
        test_transition_faults.test_the_controller_changes_its_mind,
        test_transition_faults.test_a_member_says_no,
        test_transition_faults.test_a_member_cannot,
        test_transition_faults.test_a_member_does_not_answer,
        test_transition_faults.test_a_member_is_lost,
        test_transition_faults.test_memory_cannot_be_remapped,
        test_agent_races.test_death_in_every_phase_of_a_drop,
    ],
    "memory counted both as weight and as KV": [
        test_arena.test_no_granule_is_mapped_twice,
        test_memory.test_half_the_layers_become_kv_and_come_back,
        test_memory.test_the_promise_holds_for_any_shape_and_run,
    ],
    "success that changed nothing": [
        test_admin_and_health.test_a_success_that_changed_nothing_is_a_failure,
        test_agent_groups.test_a_drop_moves_memory_and_capacity_is_the_minimum_over_stages,
        test_agent_races.test_the_answer_to_a_load_tells_what_was_loaded,
    ],
    "a group's KV is that of its scarcest stage": [
        test_drop_plan.test_capacity_is_the_minimum_over_stages,
        test_agent_groups.test_a_drop_moves_memory_and_capacity_is_the_minimum_over_stages,
    ],
    "a burst inside one report period lands on one instance": [
        test_dispatch.test_a_burst_inside_one_report_period_spreads,
        test_a_burst_before_any_report_spreads_over_the_instances,
    ],
    "all instances die, then one returns": [
        test_all_instances_dead_then_one_returns,
        test_local_cluster.test_all_instances_dead_then_one_returns,
    ],
    "a client's mistakes count against the server": [
        test_admin_and_health.test_bad_requests_are_nobodys_failure,
    ],
    "requests bound for an instance that leaves": [
        test_requests_on_their_way_to_an_instance_that_dies,
        test_agent_races.test_a_request_sent_to_an_old_leader_during_the_commit,
        test_local_cluster.test_a_killed_instance_costs_a_pause_only,
    ],
    "decodes pack into one microbatch after a drain": [
        test_scheduler.test_decodes_do_not_pack_into_one_microbatch_after_a_drain,
        test_agent_groups.test_decodes_spread_over_microbatches,
    ],
    "a preempted request loses its place": [
        test_scheduler.test_the_latest_arrival_is_preempted_and_keeps_its_place_and_output,
    ],
    "the peer with the only copy of a layer dies": [
        test_the_only_holder_of_a_layer_dies_while_it_gives_it,
        test_restore.TestSources.test_a_layer_whose_only_holder_died_comes_from_disk,
        test_transition_faults.test_layers_are_not_given,
    ],
    "a token is lost when its request changes leaders": [
        test_requests.test_the_new_leaders_tokens_wait_for_the_old_leaders_last,
    ],
}


@pytest.mark.parametrize("trap", TRAPS)
def test_every_trap_has_its_tests(trap: str) -> None:
    """Renaming a test breaks the table; one that is emptied or skipped fails here."""
    for test in TRAPS[trap]:
        assert test.__name__.startswith("test_"), test
        marks = {mark.name for mark in getattr(test, "pytestmark", ())}
        assert marks.isdisjoint({"skip", "xfail"}), test.__name__
        tree = ast.parse(textwrap.dedent(inspect.getsource(test)))
        (function,) = tree.body
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        body = [node for statement in function.body for node in ast.walk(statement)]
        assert any(isinstance(node, ast.Assert | ast.Call) for node in body), test.__name__
