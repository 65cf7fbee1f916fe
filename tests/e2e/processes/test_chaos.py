"""Random faults under load, on the real engine: the short form of ``make chaos``."""

import asyncio

import pytest

from benchmarks.faults.chaos import Setting, run_chaos


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "is_fake", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fake", "smollm2"]
)
def test_nothing_is_lost_doubled_changed_or_left(is_fake: bool) -> None:
    """Patient limits: on a busy machine a healthy instance must not look like one that hangs."""
    setting = Setting(
        seconds=6.0 if is_fake else 10.0,
        num_instances=4 if is_fake else 3,
        seed=7,
        is_fake=is_fake,
        hang_timeout_s=12.0,
        heartbeat_timeout_s=8.0,
    )
    result = asyncio.run(run_chaos(setting))
    assert result["ok"], result
    faults = result["faults"]
    assert isinstance(faults, dict) and faults.get("fronts killed"), faults
    assert result["requests"] == sum(
        result[verdict] for verdict in ("identical", "aborted", "cut", "poisoned")
    )
