"""The fused attention against the plain one, and bit by bit against itself under other batching."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.core.errors import ConfigError
from kunserve.engine.attention import TORCH_DTYPES, StepBatch, c_model
from kunserve.engine.cpu.kernels.library import set_num_threads
from kunserve.model.spec import ModelSpec
from tests.specs import model_spec
from tests.unit.engine.reference_attention import FusedAttention, ReferenceAttention

NUM_LAYERS = 3


def make_spec(
    dtype: str,
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 64,
    window: int | None = None,
    cap: float | None = None,
    global_layers: tuple[int, ...] = (),
) -> ModelSpec:
    return model_spec(
        num_layers=NUM_LAYERS,
        intermediate_size=64,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=dim,
        vocab_size=32,
        max_position=2048,
        sliding_window=window,
        score_cap=cap,
        global_layers=global_layers,
        dtype=dtype,
    )


@dataclass
class Cache:
    """KV memory full of NaN but for the K and V of some sequences, in blocks in random places."""

    spec: ModelSpec
    block_size: int
    memory: np.ndarray
    tables: np.ndarray

    @property
    def address(self) -> int:
        """Unit 0: as many guard units as layers lie below it."""
        return self.memory.ctypes.data + NUM_LAYERS * self.spec.unit_bytes(self.block_size)


def fill_cache(
    spec: ModelSpec,
    block_size: int,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    seed: int,
) -> Cache:
    """``keys[s]`` and ``values[s]`` are [tokens, layers, kv_heads, head_dim]."""
    rng = np.random.default_rng(seed)
    blocks = [-(-len(k) // block_size) for k in keys]
    num_units = NUM_LAYERS * (sum(blocks) + 3)
    unit_bytes = spec.unit_bytes(block_size)
    memory = np.full((NUM_LAYERS + num_units) * unit_bytes, 0xFF, dtype=np.uint8)  # NaN
    tables = np.full((len(keys), max(blocks) + 2), 2**30, dtype=np.int32)
    starts = rng.permutation(sum(blocks) + 1) * NUM_LAYERS - rng.integers(NUM_LAYERS + 1)
    view = torch.from_numpy(memory).view(TORCH_DTYPES[spec.dtype])
    units = view.view(-1, 2, spec.num_kv_heads, block_size, spec.head_dim)
    taken = iter(starts.tolist())
    for s, (k, v) in enumerate(zip(keys, values, strict=True)):
        for b in range(blocks[s]):
            tables[s, b] = entry = next(taken)
            for layer in range(NUM_LAYERS):
                for part, source in enumerate((k, v)):
                    piece = source[b * block_size : (b + 1) * block_size, layer]
                    unit = units[NUM_LAYERS + entry + layer, part]
                    unit[:, : len(piece)] = piece.transpose(0, 1)
    return Cache(spec, block_size, memory, tables)


def make_batch(cache: Cache, lens: list[tuple[int, int, int]]) -> StepBatch:
    """``lens``: (table row, query tokens, context tokens) of each sequence."""
    starts = np.cumsum([0] + [q for _, q, _ in lens], dtype=np.int32)
    positions = [np.arange(context - q, context, dtype=np.int32) for _, q, context in lens]
    return StepBatch(
        token_ids=np.zeros(int(starts[-1]), dtype=np.int32),
        positions=np.concatenate(positions),
        tables=cache.tables,
        rows=np.array([row for row, _, _ in lens], dtype=np.int32),
        q_starts=starts,
        context_lens=np.array([context for _, _, context in lens], dtype=np.int32),
        sample_rows=np.zeros(0, dtype=np.int32),
    )


def random_kv(spec: ModelSpec, lengths: list[int], seed: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_LAYERS, spec.num_kv_heads, spec.head_dim)
    dtype = TORCH_DTYPES[spec.dtype]
    return [
        [torch.randn(n, *shape, generator=generator).to(dtype) for n in lengths] for _ in range(2)
    ]


def random_queries(spec: ModelSpec, tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, spec.qkv_size, generator=generator).to(TORCH_DTYPES[spec.dtype])


@pytest.fixture(autouse=True)
def one_thread():
    """Threads only where a test asks: waking them on a busy machine takes most of the time."""
    torch.set_num_threads(1)
    set_num_threads(1)
    yield
    set_num_threads(1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(max_examples=50)
@given(
    block_size=st.sampled_from([8, 16, 32]),
    dim=st.sampled_from([32, 64, 96, 128, 256]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7, 8]),
    window=st.sampled_from([None, 1, 7, 64, 100]),
    cap=st.sampled_from([None, None, 1.5, 50.0]),
    global_layers=st.sampled_from([(), (1,)]),
    lens=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 150)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_fused_is_reference(
    dtype, block_size, dim, kv_heads, group, window, cap, global_layers, lens, seed
):
    spec = make_spec(dtype, kv_heads, group, dim, window, cap, global_layers)
    contexts = [max(1, queries + prefix) for queries, prefix in lens]
    cache = fill_cache(spec, block_size, *random_kv(spec, contexts, seed), seed)
    batch = make_batch(cache, [(s, lens[s][0], contexts[s]) for s in range(len(lens))])
    qkv = random_queries(spec, batch.num_tokens, seed)
    outs = [torch.empty(batch.num_tokens, spec.q_size, dtype=qkv.dtype) for _ in range(2)]
    layer = seed % NUM_LAYERS
    for backend, out in zip((FusedAttention, ReferenceAttention), outs, strict=True):
        backend(spec, cache.address, block_size).attend(layer, qkv, batch, out)
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    torch.testing.assert_close(outs[0], outs[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("window", "cap", "group", "dim"),
    [
        (None, None, 3, 64),
        (50, None, 3, 64),
        (50, 2.0, 3, 64),
        (None, None, 4, 128),
        (None, None, 1, 96),
        (None, None, 7, 32),
    ],
)
def test_bits_do_not_depend_on_batching(dtype, window, cap, group, dim):
    spec = make_spec(dtype, group=group, dim=dim, window=window, cap=cap)
    lengths = [200, 131, 64]
    kv = random_kv(spec, lengths, 1)
    queries = [random_queries(spec, n, 10 + n) for n in lengths]

    def attend(block_size: int, threads: int, steps: list[list[tuple[int, int, int]]]):
        """Outputs of every sequence, [tokens, q], computed by the given steps."""
        set_num_threads(threads)
        cache = fill_cache(spec, block_size, *kv, threads)
        backend = FusedAttention(spec, cache.address, block_size)
        outs = [torch.zeros(n, spec.q_size, dtype=queries[0].dtype) for n in lengths]
        for lens in steps:
            batch = make_batch(cache, lens)
            pieces = [queries[s][context - q : context] for s, q, context in lens]
            out = torch.empty(batch.num_tokens, spec.q_size, dtype=queries[0].dtype)
            backend.attend(1, torch.cat(pieces), batch, out)
            for (s, q, context), piece in zip(
                lens, out.split([n for _, n, _ in lens]), strict=True
            ):
                outs[s][context - q : context] = piece
        return torch.cat(outs)

    whole = attend(16, 2, [[(s, n, n) for s, n in enumerate(lengths)]])
    assert torch.equal(whole, attend(8, 1, [[(s, n, n)] for s, n in enumerate(lengths)]))
    one_by_one = [[(s, 1, t + 1) for s, n in enumerate(lengths) if t < n] for t in range(200)]
    assert torch.equal(whole, attend(32, 1, one_by_one))
    chunked = [[(0, 77, 77), (1, 1, 1), (2, 64, 64)], [(1, 130, 131), (0, 123, 200)]]
    assert torch.equal(whole, attend(16, 3, chunked))
    for num in (2, 3, 4, 5):  # as decodes with guesses
        few = [
            [(s, min(num, n - t), min(n, t + num)) for s, n in enumerate(lengths) if t < n]
            for t in range(0, 200, num)
        ]
        assert torch.equal(whole, attend(32, 1, few)), num


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("window", "global_layers"), [(None, ()), (600, ()), (600, (0,))])
def test_threads_share_a_long_context_and_no_bit_tells(dtype, window, global_layers):
    """Decodes of more than a segment: cut among threads, or whole, or the end of a prompt."""
    spec = make_spec(dtype, window=window, global_layers=global_layers)
    contexts = [1500, 700, 1025, 90]
    cache = fill_cache(spec, 16, *random_kv(spec, contexts, 3), 5)
    queries = [random_queries(spec, 40, context) for context in contexts]

    def attend(threads: int, counts: dict[int, int], backend=FusedAttention):
        """What each sequence's last token gets, where its last ``counts[s]`` are computed."""
        set_num_threads(threads)
        batch = make_batch(cache, [(s, count, contexts[s]) for s, count in counts.items()])
        qkv = torch.cat([queries[s][40 - count :] for s, count in counts.items()])
        out = torch.empty(batch.num_tokens, spec.q_size, dtype=qkv.dtype)
        backend(spec, cache.address, 16).attend(2, qkv, batch, out)
        return dict(zip(counts, out[batch.q_starts[1:] - 1], strict=True))

    prompts = attend(1, dict.fromkeys(range(4), 40))
    lone = {s: attend(3, {s: 1})[s] for s in range(4)}
    together = attend(3, dict.fromkeys(range(4), 1))
    mixed = attend(2, {0: 4, 1: 40, 2: 3, 3: 1})
    for got in (lone, together, mixed):
        assert all(torch.equal(prompts[s], got[s]) for s in range(4))
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    for s, row in attend(1, dict.fromkeys(range(4), 1), ReferenceAttention).items():
        torch.testing.assert_close(lone[s], row, rtol=tolerance, atol=tolerance)


def test_a_windowed_layer_reads_no_key_outside_its_window():
    """Whatever lies there: the cache is full of NaN but for the blocks that it may see."""
    spec = make_spec("float32", window=40, global_layers=(0, 1))
    contexts = [300, 1200]
    keys, values = random_kv(spec, contexts, 3)
    cache = fill_cache(spec, 16, keys, values, 5)
    batch = make_batch(cache, [(0, 1, 300), (1, 20, 1200)])
    qkv = random_queries(spec, batch.num_tokens, 2)
    outs = []
    for is_blanked in (False, True):
        if is_blanked:
            for s, (num_queries, context) in enumerate([(1, 300), (20, 1200)]):
                # A span of 64 keys is read whole.
                unseen = (context - num_queries - 40 + 1) // 64 * 64 // 16
                cache.tables[s, :unseen] = 2**30
        out = torch.empty(batch.num_tokens, spec.q_size)
        FusedAttention(spec, cache.address, 16).attend(2, qkv, batch, out)
        outs.append(out)
    assert outs[0].isfinite().all() and torch.equal(*outs)


def test_shapes_the_kernels_cannot_run():
    with pytest.raises(ConfigError, match="head_dim"):
        c_model(make_spec("float32", dim=48), 0, 16)
    with pytest.raises(ConfigError, match="too many"):
        c_model(make_spec("float32", kv_heads=1, group=64), 0, 16)
