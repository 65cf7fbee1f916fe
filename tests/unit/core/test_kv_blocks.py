from dataclasses import replace

import pytest

from kunserve.core.config import (
    InstanceConfig,
    KunServeConfig,
    OverloadConfig,
    SchedulerConfig,
)
from kunserve.core.errors import ConfigError
from kunserve.core.kv_blocks import KvBlocks, KvRing, ring_of
from kunserve.model.spec import period_of
from tests.specs import model_spec

GEMMA_3_1B = model_spec(
    name="gemma-3-1b", num_layers=26, sliding_window=512, global_layers=(5, 11, 17, 23)
)


def test_without_a_ring_blocks_are_counted_as_ever() -> None:
    blocks = KvBlocks(16)
    assert [blocks.holding(num) for num in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert blocks.tokens_in(3) == 48 and blocks.period == 1
    assert blocks.local_block(7) == 7 and blocks.global_place(7) == (7, 0)


def test_behind_the_ring_a_block_holds_a_period_of_them() -> None:
    blocks = KvBlocks(16, KvRing(4, 6))
    assert [blocks.holding(16 * num) for num in (4, 5, 10, 11)] == [4, 5, 5, 6]
    assert blocks.tokens_in(6) == 16 * (4 + 12)
    assert [blocks.global_place(num) for num in (3, 4, 9, 10)] == [(3, 0), (4, 5), (4, 0), (5, 5)]
    assert [blocks.local_block(num) for num in (3, 4, 11)] == [3, 0, 3]


def test_a_ring_of_gemma_3_1b() -> None:
    """A request of 32,768 tokens takes less than a quarter."""
    assert period_of(GEMMA_3_1B) == 6
    blocks = KvBlocks(16, ring_of(512, 6, 16, 512))
    assert blocks.ring == KvRing(65, 6)
    assert blocks.holding(32_768) == 65 + -(-(2048 - 65) // 6) == 396


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sliding_window": None, "global_layers": ()}, "no layers with a window"),
        ({"global_layers": ()}, "of which none see every token"),
        ({"global_layers": (0, 6, 12, 18, 24)}, "the last layer of every period"),
        ({"global_layers": (5, 11, 17)}, "of which 5, 11, 17 see every token"),
    ],
)
def test_models_without_such_periods_are_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        period_of(replace(GEMMA_3_1B, **changes))  # type: ignore[arg-type]


def test_what_does_not_go_with_a_ring_is_refused() -> None:
    asked = {"disable_hybrid_kv_cache_manager": False}
    no_prefixes = SchedulerConfig(enable_prefix_caching=False)
    KunServeConfig(instance=InstanceConfig(**asked), scheduler=no_prefixes)
    for instance, scheduler, overload, reason in (
        ({}, SchedulerConfig(), OverloadConfig(), "give --no-enable-prefix-caching too"),
        ({"device": "cuda"}, no_prefixes, OverloadConfig(), "needs --device cpu"),
        (
            {"tensor_parallel_size": 2, "num_threads": 2},
            no_prefixes,
            OverloadConfig(),
            "on one rank",
        ),
        ({}, no_prefixes, OverloadConfig(policy="migrate"), "another --overload-policy"),
    ):
        with pytest.raises(ConfigError, match=reason):
            KunServeConfig(
                instance=InstanceConfig(**asked, **instance),  # type: ignore[arg-type]
                scheduler=scheduler,
                overload=overload,
            )
