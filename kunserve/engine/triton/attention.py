"""Paged attention over units, for prompts and single tokens alike.

Products of indices are 64-bit, because units of a large cache lie further apart than 2^31 elements.
Keys are visited in tiles that begin at fixed positions, so a sequence's sums do not depend on what
else is in the batch.
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def sequence_of(q_starts, num_seqs, tile, QUERIES: tl.constexpr):
    """Whose tile it is, if it is anybody's.

    A sequence's tiles are numbered from q_starts[s] // QUERIES + s on, so some are nobody's.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(q_starts + middle) // QUERIES + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def see(queries, k, v, is_seen, scale, largest, total, mixed):
    """Let rows of queries see a tile of keys: the online softmax, all in float32."""
    scores = tl.dot(queries, k, input_precision="ieee") * scale
    scores = tl.where(is_seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    # A row that has seen nothing yet must not subtract infinity from infinity.
    safe = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2((scores - safe[:, None]) * _LOG2_E)
    shrink = tl.exp2((largest - safe) * _LOG2_E)
    total = total * shrink + tl.sum(weights, axis=1)
    product = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_largest, total, mixed * shrink[:, None] + product


@triton.jit
def attention_kernel(
    q, kv, out, tables, q_starts, context_lens, num_seqs, max_blocks, q_stride, out_stride,
    first_unit, scale, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One tile of a sequence's queries over all its keys, for one KV head.

    The rows of a tile are ``QUERIES`` tokens times ``GROUP`` heads. ``first_unit`` is where unit 0
    of the layer lies in ``kv``. ``window`` 0 is none.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = sequence_of(q_starts, num_seqs, tile, QUERIES)
    first = tl.load(q_starts + seq)
    end = tl.load(q_starts + seq + 1)
    begin = first + (tile - (first // QUERIES + seq)) * QUERIES
    if begin < end:
        behind = tl.load(context_lens + seq) - end  # a token's position is its number plus this
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, HEAD_PAD)
        is_dim = dims < HEAD_DIM
        tokens = begin + rows // GROUP
        is_there = ((rows < QUERIES * GROUP) & (tokens < end))[:, None] & is_dim[None, :]
        columns = ((kv_head * GROUP + rows % GROUP) * HEAD_DIM)[:, None] + dims[None, :]
        wide = tokens.to(tl.int64)[:, None]
        queries = tl.load(q + wide * q_stride + columns, mask=is_there, other=0.0)
        positions = (behind + tokens)[:, None]
        largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        mixed = tl.zeros((ROWS, HEAD_PAD), dtype=tl.float32)
        stop = behind + tl.minimum(begin + QUERIES, end)
        start = 0
        if window > 0:
            start = tl.maximum(0, behind + begin - window + 1) // KEYS * KEYS
        for key in range(start, stop, KEYS):
            at = key + tl.arange(0, KEYS)
            is_key = at < stop
            entries = tl.load(tables + seq * max_blocks + at // BLOCK_SIZE, mask=is_key, other=0)
            unit = (entries.to(tl.int64) + first_unit) * (2 * KV_HEADS * BLOCK_SIZE * HEAD_DIM)
            keys = unit + (kv_head * BLOCK_SIZE + at % BLOCK_SIZE) * HEAD_DIM
            k_at = kv + keys[None, :] + dims[:, None]
            k = tl.load(k_at, mask=is_dim[:, None] & is_key[None, :], other=0.0)
            v_at = kv + KV_HEADS * BLOCK_SIZE * HEAD_DIM + keys[:, None] + dims[None, :]
            v = tl.load(v_at, mask=is_key[:, None] & is_dim[None, :], other=0.0)
            is_seen = (at[None, :] <= positions) & is_key[None, :]
            if window > 0:
                is_seen = is_seen & (at[None, :] > positions - window)
            largest, total, mixed = see(queries, k, v, is_seen, scale, largest, total, mixed)
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + wide * out_stride + columns, mixed.to(out.dtype.element_ty), mask=is_there)
