"""``observe`` foretells what ``drop`` does: the same burst under both, in the simulator."""

import pytest

from kunserve.core.config import OverloadConfig
from kunserve_lab.compare.simulated.simulation import SimResult, simulate
from kunserve_lab.compare.systems import System, find_system
from tests.lab.sim.worlds import burst, scenario

OBSERVE = System("observe", OverloadConfig(policy="observe"), "drops in thought")


def waiting_s(result: SimResult) -> float:
    return sum(record.token_times_s[0] - record.sent_s for record in result.run.records)


def test_observe_foretells_the_waiting_that_a_drop_avoids() -> None:
    world = scenario(burst(80, 0.12))
    plain, dropped, watched = (
        simulate(system, world)
        for system in (find_system("recompute"), find_system("drop"), OBSERVE)
    )
    assert watched.metrics == plain.metrics, "to observe changes nothing"
    assert plain.observed is None and watched.observed is not None
    assert watched.num_drops == 0 and watched.observed.num_drops == dropped.num_drops == 1
    avoided_s = waiting_s(plain) - waiting_s(dropped)
    assert avoided_s > 100.0
    assert watched.observed.wait_s == pytest.approx(avoided_s, rel=0.2)
    assert 20 <= watched.observed.num_requests <= 80


def test_without_pressure_it_sees_nothing() -> None:
    result = simulate(OBSERVE, scenario(burst(10, 0.5)))
    assert result.observed is not None and result.observed.num_drops == 0
