"""Whose requests a death speaks against, while groups become others."""

import pytest

from kunserve.control.cluster.requests.quarantine import Blame, Cause
from kunserve.control.cluster.transition import Phase
from kunserve.core.ids import InstanceId, RequestId
from tests.fake_cluster import FakeCluster, link

ZERO, ONE = InstanceId(0), InstanceId(1)


def committing(*, zero_said: bool) -> tuple[FakeCluster, dict[InstanceId, set[RequestId]]]:
    """A drop of two whose second member has not said ``Committed``; who ran where before it."""
    cluster = FakeCluster()
    for _ in range(6):
        cluster.request(6, 12)
    cluster.run_until(lambda: all(a.token_ids for a in cluster.accounts.values()))
    cluster.drop((0, 0, 2), (1, 2, 4))
    (transition,) = cluster.controller.transitions.active.values()

    def has_come() -> bool:
        return transition.phase is Phase.COMMITTING and (ZERO in transition.waits_for) != zero_said

    cluster.run_except(link(ZERO, ONE), has_come)  # which ONE waits for
    assert has_come() and ONE in transition.waits_for
    led = {i: set(cluster.controller._requests.led_by(i)) for i in (ZERO, ONE)}
    assert all(led.values())
    return cluster, led


@pytest.mark.parametrize("zero_said", [False, True])
@pytest.mark.parametrize("dead", [ZERO, ONE])
def test_who_has_not_switched_dies_of_what_it_ran_before(dead: InstanceId, zero_said: bool) -> None:
    cluster, led = committing(zero_said=zero_said)
    cluster.kill_instance(dead, Blame(Cause.INSIDE))
    has_switched = dead == ZERO and zero_said
    suspects = led[ZERO] | led[ONE] if has_switched else led[dead]
    assert set(cluster.controller._requests.quarantine._points) == suspects
    cluster.start_instance(dead)
    cluster.finish()
