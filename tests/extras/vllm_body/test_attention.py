"""Attention that writes K and V first, of rows that lie apart: the bits of our engine's own."""

import pytest
import torch

from kunserve_extras.vllm_body.attention import Heads, PagedAttention
from tests.unit.engine.reference_attention import FusedAttention
from tests.unit.engine.test_attention import (
    NUM_LAYERS,
    fill_cache,
    make_batch,
    make_spec,
    random_kv,
    random_queries,
)

BLOCK_SIZE, LAYER = 16, 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (40, 2.0)])
@pytest.mark.parametrize("is_fused", [True, False])
def test_a_step_of_prompts_and_tokens(
    dtype: str, window: int | None, cap: float | None, is_fused: bool
) -> None:
    spec = make_spec(dtype, window=window, cap=cap)
    contexts, counts = [70, 33, 200], [70, 1, 90]
    keys, values = random_kv(spec, contexts, 1)
    steps = list(zip(range(3), counts, contexts, strict=True))
    cache = fill_cache(spec, BLOCK_SIZE, keys, values, 2)
    batch = make_batch(cache, steps)
    qkv = random_queries(spec, batch.num_tokens, 3)
    wanted = torch.empty(batch.num_tokens, spec.q_size, dtype=qkv.dtype)
    FusedAttention(spec, cache.address, BLOCK_SIZE).attend(LAYER, qkv, batch, wanted)

    for s, count, context in steps:  # the step's own are not there yet
        keys[s][context - count :] = values[s][context - count :] = torch.nan
    bare = fill_cache(spec, BLOCK_SIZE, keys, values, 2)
    before = bare.memory.copy()
    whole = random_kv(spec, contexts, 1)
    new = [
        torch.cat([part[s][context - count :, LAYER] for s, count, context in steps]).flatten(1)
        for part in whole
    ]
    rows = [qkv[:, : spec.q_size], *new]
    if is_fused:  # as one product gives them
        rows = list(torch.cat(rows, dim=1).split([one.shape[1] for one in rows], dim=1))
    units = torch.from_numpy(bare.memory).view(qkv.dtype)
    units = units.view(-1, spec.num_kv_heads, BLOCK_SIZE, 2 * spec.head_dim)
    heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim**-0.5, cap or 0.0)
    ours = PagedAttention(heads, units, NUM_LAYERS)
    ours.begin(make_batch(bare, steps))
    assert torch.equal(ours.attend(LAYER, window or 0, *rows), wanted)
    written = (bare.memory != before).reshape(len(units), -1).any(axis=1).sum()
    assert written == sum(
        -(-context // 16) - (context - count) // 16 for _, count, context in steps
    )
