"""The Triton kernels in Triton's interpreter, against plain torch.

``test_triton`` runs this file in a process of its own, because Triton reads its variable once.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.gpu_phases.kernels import exact_attention
from kunserve.engine.attention import StepBatch
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.ops.reference import ReferenceOps
from kunserve_extras.torch_body.ops.table import DeviceBatch, Ops
from kunserve_extras.triton_ops import ops as triton_ops
from kunserve_extras.triton_ops.ops import TritonOps
from kunserve_extras.triton_ops.tiles import tiles_for
from tests.specs import model_spec
from tests.unit.engine.gpu_kernels.interpreter import patch

patch()

CPU = torch.device("cpu")
NUM_UNITS = 40
SHAPES = [  # heads, KV heads, head_dim, block size, window
    pytest.param(4, 4, 64, 8, None, marks=pytest.mark.slow),
    pytest.param(9, 3, 64, 16, None, marks=pytest.mark.slow),
    pytest.param(10, 2, 128, 4, 11, marks=pytest.mark.slow),
    pytest.param(7, 1, 80, 16, None, marks=pytest.mark.slow),  # so are the parts of keys below
    (8, 1, 32, 5, 3),
]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is kept busy by hundreds, most of which have no part of such short sequences."""
    monkeypatch.setattr(triton_ops, "_PROGRAMS", 16)


def spec_of(heads: int, kv_heads: int, head_dim: int, window: int | None) -> ModelSpec:
    """With a window in layer 2, which the others have not, and scores that are capped."""
    has_window = window is not None
    return model_spec(
        num_layers=3, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        hidden_size=64, sliding_window=window, dtype="float32",
        global_layers=(0,) if has_window else (), score_cap=2.0 if has_window else None,
    )  # fmt: skip


def mixed_batch(block_size: int, num_layers: int) -> StepBatch:
    """A prompt, a chunk, and two single tokens; entries as low as they may be."""
    generator = np.random.default_rng(0)
    lengths, contexts = np.array([13, 1, 6, 1]), np.array([13, 20, 25, 1])
    width = -(-int(contexts.max()) // block_size)
    starts = generator.permutation(NUM_UNITS - 2 * num_layers)[: 4 * width]
    # A stage whose layers are 1 and 2 writes entries one below the first unit.
    tables = (starts - 1).reshape(4, -1).astype(np.int32)
    tables[0, 0] = -1
    q_starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = [np.arange(c - n, c) for n, c in zip(lengths, contexts, strict=True)]
    return StepBatch(
        token_ids=np.zeros(int(q_starts[-1]), dtype=np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        tables=tables,
        rows=np.array([2, 0, 1, 3], dtype=np.int32),
        q_starts=q_starts,
        context_lens=contexts.astype(np.int32),
        sample_rows=q_starts[1:] - 1,
    )


@pytest.mark.parametrize("is_gemma", [None, False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size", "window"), SHAPES)
def test_attention_and_the_cache(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    is_gemma: bool | None,
) -> None:
    """Heads are not normalised, or by weights, or as Gemma's by weights + 1."""
    spec = replace(spec_of(heads, kv_heads, head_dim, window), has_offset_norms=bool(is_gemma))
    torch.manual_seed(0)
    units = (spec.num_layers + NUM_UNITS * 4, 2, kv_heads, block_size, head_dim)
    batch = DeviceBatch.of(mixed_batch(block_size, spec.num_layers), block_size, CPU)
    num = len(batch.positions)
    qkv = torch.randn(num, heads + 2 * kv_heads, head_dim)
    kv, angles = torch.randn(units), torch.rand(num, 2, head_dim // 2)
    norms = None if is_gemma is None else (torch.rand(head_dim) + 0.5, torch.rand(head_dim))
    results = []
    for ops in (ReferenceOps(spec), TritonOps(spec)):
        mine, out = kv.clone(), torch.full((num, heads * head_dim), 7.0)
        for layer in (1, 2):
            rows = qkv.clone()
            q, k, v = rows.split([heads, kv_heads, kv_heads], dim=1)
            ops.place(layer, (q, k, v), norms, angles, mine, batch)
        # Triton's do not ask the host in every layer.
        seen = batch if isinstance(ops, ReferenceOps) else replace(batch, host=None)
        ops.attend(2, q, mine, seen, out)
        results.append((mine, q, v, out))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
    # Nothing else was touched, and values arrive as they were.
    written = results[1][0] != kv
    assert torch.equal(written, results[0][0] != kv) and written.any()
    assert torch.equal(results[1][0][:, 1], results[0][0][:, 1])
    assert torch.equal(results[1][2], qkv[:, heads + kv_heads :])


def batch_of(lengths: list[int], contexts: list[int], block_size: int, layers: int) -> StepBatch:
    """Sequences whose blocks lie in random order, the first as low as it may be."""
    width = -(-max(contexts) // block_size)
    starts = np.random.default_rng(1).permutation(len(lengths) * width) * layers - layers
    q_starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = [np.arange(c - n, c) for n, c in zip(lengths, contexts, strict=True)]
    return StepBatch(
        token_ids=np.zeros(int(q_starts[-1]), dtype=np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        tables=starts.reshape(len(lengths), width).astype(np.int32),
        rows=np.arange(len(lengths), dtype=np.int32),
        q_starts=q_starts,
        context_lens=np.array(contexts, dtype=np.int32),
        sample_rows=q_starts[1:] - 1,
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "most"),
    [
        pytest.param((9, 3, 64, 16, None), torch.float32, 1e-6, marks=pytest.mark.slow),
        ((7, 1, 80, 5, 70), torch.float32, 1e-6),
        # The tiles of bfloat16, which the interpreter cannot multiply.
        pytest.param((10, 2, 128, 64, None), torch.float16, 3e-3, marks=pytest.mark.slow),
    ],
)
def test_parts_of_the_keys_give_what_float64_gives(
    shape: tuple[int, int, int, int, int | None],
    dtype: torch.dtype,
    most: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the same bits in any company, and whatever number of programs shares a sequence."""
    heads, kv_heads, head_dim, block_size, window = shape
    monkeypatch.setattr(triton_ops, "LEAST_PART_KEYS", 64)
    name = "float32" if dtype is torch.float32 else "bfloat16"
    spec = replace(spec_of(heads, kv_heads, head_dim, window), dtype=name)
    tiles = replace(tiles_for(spec), parts=4)
    lengths, contexts = [1, 30, 1, 1, 1, 1], [1, 90, 64, 65, 330, 129]
    host = batch_of(lengths, contexts, block_size, spec.num_layers)
    num_units = int(host.tables.max()) + 2 * spec.num_layers + 1
    torch.manual_seed(0)
    kv = torch.randn(num_units, 2, kv_heads, block_size, head_dim).to(dtype)
    q = torch.randn(host.num_tokens, heads, head_dim).to(dtype)
    found = []
    for num_programs in (1, 264):
        monkeypatch.setattr(triton_ops, "_PROGRAMS", num_programs)
        out = torch.full((len(q), heads * head_dim), 7.0, dtype=dtype)
        TritonOps(spec, tiles).attend(1, q, kv, DeviceBatch.of(host, block_size, CPU), out)
        found.append(out)
    assert torch.equal(*found)
    exact = exact_attention(spec, 1, q, kv, host, block_size)
    assert float((found[0].double() - exact).abs().max()) <= most
    for seq in (3, 4):
        first = int(host.q_starts[seq])
        lonely = replace(
            host,
            token_ids=host.token_ids[first : first + 1],
            positions=host.positions[first : first + 1],
            rows=host.rows[seq : seq + 1],
            q_starts=np.array([0, 1], dtype=np.int32),
            context_lens=host.context_lens[seq : seq + 1],
            sample_rows=np.zeros(1, dtype=np.int32),
        )
        alone = torch.zeros(1, heads * head_dim, dtype=dtype)
        batch = DeviceBatch.of(lonely, block_size, CPU)
        TritonOps(spec, tiles).attend(1, q[first : first + 1], kv, batch, alone)
        assert torch.equal(alone[0], found[0][first])


def attended(ops: TritonOps, spec: ModelSpec, context: int, block_size: int) -> torch.Tensor:
    """A single token over keys that do not depend on how they are cut into blocks."""
    host = batch_of([1], [context], block_size, spec.num_layers)
    torch.manual_seed(0)
    q, rows = torch.randn(1, spec.num_heads, spec.head_dim), torch.randn(2, 2, 640, spec.head_dim)
    num_units = int(host.tables.max()) + 2 * spec.num_layers + 1
    kv = torch.zeros(num_units, 2, spec.num_kv_heads, block_size, spec.head_dim)
    for number, entry in enumerate(host.tables[0].tolist()):
        first = number * block_size
        kv[entry + spec.num_layers] = rows[:, :, first : first + block_size]
    out = torch.full((1, spec.num_heads * spec.head_dim), 7.0)
    batch = DeviceBatch.of(host, block_size, CPU)
    # No layer asks the host's arrays again.
    ops.attend(0, q, kv, replace(batch, host=None), out)
    return out


def test_bits_do_not_depend_on_blocks_and_one_part_needs_no_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Entries of one block, and of each key, are both loaded a tile ahead."""
    spec = spec_of(4, 2, 32, None)
    ops = TritonOps(spec)
    long = [attended(ops, spec, 600, block_size) for block_size in (64, 16)]
    assert torch.equal(*long)
    monkeypatch.setattr(triton_ops, "join_kernel", None)  # what is launched now fails
    short = [attended(ops, spec, 256, block_size) for block_size in (64, 16)]
    assert torch.equal(*short) and not (short[0] == 7.0).any()
    with pytest.raises(TypeError):
        attended(ops, spec, 257, 64)
    with pytest.raises(TypeError):  # the first time it is compiled, needed or not
        attended(TritonOps(spec), spec, 1, 64)


@pytest.mark.parametrize("width", [64, 96, 576])
@pytest.mark.parametrize("is_gemma", [False, True])
def test_rows(width: int, is_gemma: bool) -> None:
    spec = replace(spec_of(4, 2, 32, None), has_gelu=is_gemma, has_offset_norms=is_gemma)
    torch.manual_seed(0)
    x, weight = torch.randn(5, width), torch.rand(width) + 0.5
    heads = torch.randn(5, 6, 32)
    results: list[list[torch.Tensor]] = []
    for ops in (ReferenceOps(spec), TritonOps(spec)):
        checked: Ops = ops
        normed, gated = torch.zeros(5, width), torch.zeros(5, width)
        by_head = heads.clone()
        checked.rms_norm(x, weight, 1e-5, normed)
        checked.gate_mul(torch.cat((x, x.flip(1)), dim=1), gated)
        checked.rms_norm(by_head[:, :4], weight[:32], 1e-5, by_head[:, :4])
        results.append([normed, gated, by_head])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
