"""Paged attention over units: sequences of several tokens in tiles, those of one token in parts.

Which keys are added up together follows from a sequence alone, so its sums do not depend on what
else is in the batch. Products of indices are 64-bit, because units of a large cache lie further
apart than 2^31 elements.

Triton compiles a kernel anew for a number that is 1, or a multiple of 16. What changes from step to
step or from layer to layer is named in ``do_not_specialize``, so that no request waits for that.
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
def see(queries, k, v, is_seen, scale, largest, total, mixed, CAP: tl.constexpr):
    """Let rows of queries see a tile of keys: the online softmax, all in float32."""
    scores = tl.dot(queries, k, input_precision="ieee") * scale
    if CAP > 0:  # times tanh, which is 1 - 2 / (e^2x + 1)
        scores = CAP - 2.0 * CAP / (tl.exp2(scores * (2.0 / CAP * _LOG2_E)) + 1.0)
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
def tile_entries(table, key, is_there, stop, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """Block table entries of the tile of keys from ``key`` on: of each, or one of one block."""
    if BLOCK_SIZE % KEYS == 0:
        entries = tl.load(table + key // BLOCK_SIZE, mask=is_there, other=0)
    else:
        at = key + tl.arange(0, KEYS)
        entries = tl.load(table + at // BLOCK_SIZE, mask=at < stop, other=0)
    return entries


@triton.jit
def look_back(
    queries, positions, kv, table, kv_head, first_unit, start, stop, scale, window,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """What rows of queries see of the keys [start, stop); ``start`` is a multiple of ``KEYS``."""
    dims = tl.arange(0, HEAD_PAD)
    is_dim = dims < HEAD_DIM
    largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    mixed = tl.zeros((ROWS, HEAD_PAD), dtype=tl.float32)
    # Where a tile's keys lie is loaded one tile ahead: no load of keys then waits for another one,
    # and all stages hold keys.
    ahead = tile_entries(table, start, start < stop, stop, BLOCK_SIZE, KEYS)
    for key in range(start, stop, KEYS):
        entries = ahead
        ahead = tile_entries(table, key + KEYS, key + KEYS < stop, stop, BLOCK_SIZE, KEYS)
        at = key + tl.arange(0, KEYS)
        is_key = at < stop
        units = (entries.to(tl.int64) + first_unit) * (2 * KV_HEADS * BLOCK_SIZE * HEAD_DIM)
        if BLOCK_SIZE % KEYS == 0:  # one run of memory
            inside = (kv_head * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_DIM
            keys = units + inside + tl.arange(0, KEYS) * HEAD_DIM
        else:
            keys = units + (kv_head * BLOCK_SIZE + at % BLOCK_SIZE) * HEAD_DIM
        k_at = kv + keys[None, :] + dims[:, None]
        k = tl.load(k_at, mask=is_dim[:, None] & is_key[None, :], other=0.0)
        v_at = kv + KV_HEADS * BLOCK_SIZE * HEAD_DIM + keys[:, None] + dims[None, :]
        v = tl.load(v_at, mask=is_key[:, None] & is_dim[None, :], other=0.0)
        is_seen = (at[None, :] <= positions) & is_key[None, :]
        if window > 0:
            is_seen = is_seen & (at[None, :] > positions - window)
        largest, total, mixed = see(queries, k, v, is_seen, scale, largest, total, mixed, CAP)
    return largest, total, mixed


@triton.jit(do_not_specialize=["num_seqs", "max_blocks", "first_unit", "window"])
def attention_kernel(
    q, kv, out, tables, q_starts, context_lens, num_seqs, max_blocks, q_stride, out_stride,
    first_unit, scale, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """One tile of the queries of a sequence of several tokens, over all its keys, for one KV head.

    The rows of a tile are ``QUERIES`` tokens times ``GROUP`` heads. ``first_unit`` is where unit 0
    of the layer lies in ``kv``. ``window`` 0 is none, and so is ``CAP`` of scores.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = sequence_of(q_starts, num_seqs, tile, QUERIES)
    first = tl.load(q_starts + seq)
    end = tl.load(q_starts + seq + 1)
    begin = first + (tile - (first // QUERIES + seq)) * QUERIES
    if (begin < end) & (end - first > 1):
        behind = tl.load(context_lens + seq) - end  # a token's position is its number plus this
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, HEAD_PAD)
        tokens = begin + rows // GROUP
        is_there = ((rows < QUERIES * GROUP) & (tokens < end))[:, None] & (dims < HEAD_DIM)[None, :]
        columns = ((kv_head * GROUP + rows % GROUP) * HEAD_DIM)[:, None] + dims[None, :]
        wide = tokens.to(tl.int64)[:, None]
        queries = tl.load(q + wide * q_stride + columns, mask=is_there, other=0.0)
        stop = behind + tl.minimum(begin + QUERIES, end)
        start = 0
        if window > 0:
            start = tl.maximum(0, behind + begin - window + 1) // KEYS * KEYS
        _, total, mixed = look_back(
            queries, (behind + tokens)[:, None], kv, tables + seq * max_blocks, kv_head,
            first_unit, start, stop, scale, window,
            KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, ROWS, KEYS, CAP,
        )  # fmt: skip
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + wide * out_stride + columns, mixed.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def parts_of(context, window, PARTS: tl.constexpr, LEAST: tl.constexpr, KEYS: tl.constexpr):
    """How the keys of a sequence of one token are parted: (first key, keys of a part, parts)."""
    start = 0
    if window > 0:
        start = tl.maximum(0, context - window) // KEYS * KEYS
    num_keys = context - start
    each = tl.maximum(LEAST, tl.cdiv(tl.cdiv(num_keys, PARTS), KEYS) * KEYS)
    return start, each, tl.cdiv(num_keys, each)


@triton.jit(do_not_specialize=["max_blocks", "first_unit", "window"])
def part_kernel(
    q, kv, sums, out, tables, q_starts, context_lens, max_blocks, q_stride, out_stride,
    first_unit, scale, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
    LEAST: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Parts of the keys of one sequence of one token, for the heads of one KV head.

    A program takes every n-th part, where n programs share the sequence. The only part of a
    sequence goes to ``out``, others to ``sums``. These are float32, for each head of a sequence
    weighted values [PARTS, HEAD_PAD], then largest scores [PARTS] and total weights [PARTS].
    Neighbours in the grid are KV heads of one sequence, because these lie side by side in a unit:
    programs that run at the same time then touch few pages of memory.
    """
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    first = tl.load(q_starts + seq)
    if tl.load(q_starts + seq + 1) - first == 1:
        context = tl.load(context_lens + seq)
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, HEAD_PAD)
        is_row = rows < GROUP
        is_there = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        heads = kv_head * GROUP + rows
        at = q + first.to(tl.int64) * q_stride + (heads * HEAD_DIM)[:, None] + dims[None, :]
        queries = tl.load(at, mask=is_there, other=0.0)
        positions = tl.full((ROWS, 1), 0, dtype=tl.int32) + (context - 1)
        start, each, num_parts = parts_of(context, window, PARTS, LEAST, KEYS)
        for part in range(tl.program_id(2), num_parts, tl.num_programs(2)):
            begin = start + part * each
            largest, total, mixed = look_back(
                queries, positions, kv, tables + seq * max_blocks, kv_head,
                first_unit, begin, tl.minimum(begin + each, context), scale, window,
                KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, ROWS, KEYS, CAP,
            )  # fmt: skip
            if num_parts == 1:  # as a join of one would have it
                columns = (heads * HEAD_DIM)[:, None] + dims[None, :]
                whole = (mixed / total[:, None]).to(out.dtype.element_ty)
                tl.store(out + first.to(tl.int64) * out_stride + columns, whole, mask=is_there)
            else:
                of_head = seq.to(tl.int64) * (KV_HEADS * GROUP) + heads
                to = sums + of_head * (PARTS * (HEAD_PAD + 2))
                values = to[:, None] + part * HEAD_PAD + dims[None, :]
                tl.store(values, mixed, mask=is_row[:, None])
                tl.store(to + PARTS * HEAD_PAD + part, largest, mask=is_row)
                tl.store(to + PARTS * (HEAD_PAD + 1) + part, total, mask=is_row)


@triton.jit(do_not_specialize=["window"])
def join_kernel(
    sums, out, q_starts, context_lens, out_stride, window,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, KEYS: tl.constexpr,
    PARTS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """One head of one sequence of one token and several parts, from these, in their order."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(q_starts + seq)
    context = tl.load(context_lens + seq)
    _, _, num_parts = parts_of(context, window, PARTS, LEAST, KEYS)
    if (tl.load(q_starts + seq + 1) - first == 1) & (num_parts > 1):
        parts = tl.arange(0, PARTS)
        dims = tl.arange(0, HEAD_PAD)
        is_part = parts < num_parts
        at = sums + (seq.to(tl.int64) * HEADS + head) * (PARTS * (HEAD_PAD + 2))
        values = at + parts[:, None] * HEAD_PAD + dims[None, :]
        mixed = tl.load(values, mask=is_part[:, None], other=0.0)
        largest = tl.load(at + PARTS * HEAD_PAD + parts, mask=is_part, other=float("-inf"))
        total = tl.load(at + PARTS * (HEAD_PAD + 1) + parts, mask=is_part, other=0.0)
        shrink = tl.exp2((largest - tl.max(largest, axis=0)) * _LOG2_E)
        whole = tl.sum(mixed * shrink[:, None], axis=0) / tl.sum(total * shrink, axis=0)
        to = out + first.to(tl.int64) * out_stride + head * HEAD_DIM + dims
        tl.store(to, whole.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
