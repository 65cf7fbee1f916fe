"""What each rank of an instance holds, and what cannot be parted."""

import re
from dataclasses import replace

import pytest

from kunserve.core.config import InstanceConfig
from kunserve.core.errors import ConfigError
from kunserve.model.sharding import config_of_rank, first_kv_head, spec_of_rank, vocab_of_rank
from tests.specs import model_spec

WIDE = model_spec(
    num_heads=12, num_kv_heads=4, head_dim=32, intermediate_size=1536, vocab_size=1000
)


def test_ranks_hold_equal_parts() -> None:
    rank = spec_of_rank(WIDE, 2)
    assert (rank.num_heads, rank.num_kv_heads, rank.intermediate_size) == (6, 2, 768)
    assert rank.hidden_size == WIDE.hidden_size and rank.num_layers == WIDE.num_layers
    assert 2 * rank.unit_bytes(16) == WIDE.unit_bytes(16)
    assert [first_kv_head(WIDE, number, 2) for number in range(2)] == [0, 2]


def test_a_kv_head_is_held_by_several_ranks_where_there_are_more() -> None:
    few = replace(WIDE, num_kv_heads=2)
    assert spec_of_rank(few, 4).num_kv_heads == 1
    assert [first_kv_head(few, number, 4) for number in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("vocab_size", [15, 64, 1000, 1001])
def test_every_token_is_one_ranks(num_ranks: int, vocab_size: int) -> None:
    spec = replace(WIDE, vocab_size=vocab_size, num_kv_heads=12)
    ranges = [vocab_of_rank(spec, rank, num_ranks) for rank in range(num_ranks)]
    tokens = [token for part in ranges for token in range(*part)]
    assert tokens == list(range(vocab_size))
    room = spec_of_rank(spec, num_ranks).vocab_size if num_ranks > 1 else vocab_size
    assert all(part.num_rows <= room for part in ranges)


@pytest.mark.parametrize(
    ("changes", "num_ranks", "why"),
    [
        ({}, 5, "12 attention heads, which it does not divide; this model goes over 2, 4 or 12"),
        ({"num_kv_heads": 3}, 2, "3 KV heads; the ranks must divide them"),
        ({"intermediate_size": 1530}, 4, "the MLP of .* is 1530 wide"),
        ({"intermediate_size": 1544}, 4, "in whole 16 bytes"),
    ],
)
def test_what_cannot_be_parted(changes: dict[str, int], num_ranks: int, why: str) -> None:
    spec = replace(WIDE, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {num_ranks}: .*{why}"):
        spec_of_rank(spec, num_ranks)


def test_memory_and_threads_are_divided() -> None:
    whole = InstanceConfig(memory_bytes=1001, num_threads=6, tensor_parallel_size=3)
    rank = config_of_rank(whole)
    assert (rank.memory_bytes, rank.num_threads, rank.tensor_parallel_size) == (333, 2, 1)
    kv = config_of_rank(replace(whole, kv_cache_memory_bytes=100, num_threads=1))
    assert (kv.kv_cache_memory_bytes, kv.num_threads) == (34, 1)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"device": "cuda", "attention": "flashinfer"},
            "--attention-backend flashinfer computes on one rank only",
        ),
        ({"num_threads": 3}, "--num-threads 3 are for all ranks"),
    ],
)
def test_settings_that_do_not_go_over_ranks(given: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        InstanceConfig(tensor_parallel_size=2, **given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=re.escape("must be 1 or more, not 0")):
        InstanceConfig(tensor_parallel_size=0)
