import asyncio
from collections.abc import Callable

import pytest

from kunserve.cluster.driver.forced import ForcedTransitions
from kunserve.core.errors import InvalidRequest
from tests.unit.control.cluster.brain import BLOCKS, Brain


def two_pairs() -> Brain:
    brain = Brain(4, policy="drop", restore_hold_s=1e6)
    for _ in range(2):
        brain.controller.force_drop(None, brain.now_s)
        brain.pass_time()
        brain.complete()
    assert brain.groups == [(0, 1), (2, 3)]
    return brain


def restore(brain: Brain) -> str:
    async def until(is_so: Callable[[], bool]) -> None:
        if not is_so():
            brain.complete()
        assert is_so()

    forced = ForcedTransitions(
        brain.controller, lambda: brain.now_s, lambda: brain.pass_time(0.0), until
    )
    return asyncio.run(forced.restore())


def test_a_restore_tells_of_pipelines_that_do_not_part() -> None:
    brain = two_pairs()
    brain.report(0, used_blocks=1)
    brain.report(2, used_blocks=1, largest_request_blocks=2 * BLOCKS)
    done, why = restore(brain).split("; ")
    assert done.startswith("restore id=")
    assert (
        why == f"not restored: a request of {2 * BLOCKS} blocks is larger than a pool of {BLOCKS}"
    )
    assert brain.groups == [(2, 3), (0,), (1,)]
    with pytest.raises(InvalidRequest, match="nothing was restored: a request of"):
        brain.report(0)
        brain.report(1)
        restore(brain)


def test_a_drop_of_shared_weights_is_refused_by_that_name() -> None:
    brain = Brain(2, policy="drop", shared_weights_bytes=1 << 20)
    forced = ForcedTransitions(
        brain.controller, lambda: brain.now_s, brain.pass_time, asyncio.sleep
    )
    with pytest.raises(InvalidRequest, match="weights are shared, nothing to drop"):
        asyncio.run(forced.drop(None))


def test_a_restore_of_all_tells_of_nothing_else() -> None:
    brain = two_pairs()
    for leader in (0, 2):
        brain.report(leader, used_blocks=1)
    assert "not restored" not in restore(brain)
    assert brain.groups == [(0,), (1,), (2,), (3,)]
