"""Simulated instances that keep KV of layers with a window in a ring."""

import pytest

from kunserve.core.errors import ConfigError
from kunserve.core.kv_blocks import KvRing
from kunserve_lab.compare.simulated.scenario import profile_of
from kunserve_lab.compare.systems import find_system
from tests.lab.sim.worlds import GEMMA, burst, run, scenario, small_profile

LONG = (12_000, 200)


def test_the_same_memory_holds_more_requests() -> None:
    """Three whole requests, or eight with a ring of 49 of 191 blocks."""
    world = scenario(burst(6, 0.1, LONG), 1, small_profile(40_000, GEMMA))
    whole, ring = (
        run(system, world, is_drained=True) for system in ("recompute", "recompute-ring")
    )
    assert ring.metrics.num_completed == whole.metrics.num_completed == 6
    assert ring.run.duration_s < whole.run.duration_s
    most = [max(one.num_running or 0 for one in result.run.samples) for result in (whole, ring)]
    assert most == [3, 6]
    made = profile_of(find_system("recompute-ring"), world.profile, 2048)
    assert made.spec.kv_ring == KvRing(49, 6)
    assert made.spec.blocks.holding(12_200) == 49 + -(-(191 - 49) // 6)
    assert made.max_model_len > 3 * world.profile.max_model_len


def test_a_drop_and_a_restore_cut_between_periods() -> None:
    result = run(
        "drop-ring",
        scenario(burst(24, 0.3, LONG), 2, small_profile(26_000, GEMMA)),
        is_drained=True,
    )
    assert result.metrics.num_completed == 24 and result.num_drops
    for transition in result.transitions:
        for group in transition.groups_after:
            assert all(stage.layers.first % 6 == 0 for stage in group.stages)


def test_a_model_without_windows_is_refused() -> None:
    with pytest.raises(ConfigError, match="recompute-ring is for models with windows"):
        run("recompute-ring", scenario(burst(1, 1.0), 1, small_profile()))
