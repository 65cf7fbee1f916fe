"""What is done to each token's row or head alone: norm, activation, rotation into the cache."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x, weight, out, x_stride, x_head_stride, out_stride, out_head_stride, eps,
    WIDTH: tl.constexpr, PAD: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """One row, or one head of one row, normalised in float32. ``OFFSET``: times weight + 1."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, PAD)
    is_there = columns < WIDTH
    at = x + row * x_stride + head * x_head_stride + columns
    values = tl.load(at, mask=is_there, other=0.0)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    weights = tl.load(weight + columns, mask=is_there, other=0.0)
    if OFFSET:
        normed = (wide * scale * (weights.to(tl.float32) + 1.0)).to(values.dtype)
    else:
        normed = (wide * scale).to(values.dtype) * weights
    to = out + row * out_stride + head * out_head_stride + columns
    tl.store(to, normed, mask=is_there)


@triton.jit
def gate_mul_kernel(
    gate_up, out, in_stride, out_stride,
    WIDTH: tl.constexpr, PIECE: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up for a piece of one row, or with ``GELU`` gelu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    is_there = columns < WIDTH
    at = gate_up + row * in_stride + columns
    gate = tl.load(at, mask=is_there, other=0.0)
    up = tl.load(at + WIDTH, mask=is_there, other=0.0)
    wide = gate.to(tl.float32)
    slope = wide
    if GELU:  # by tanh: x (1 + tanh(u)) / 2 is x sigmoid(2 u)
        slope = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    opened = (wide / (1.0 + tl.exp2(slope * -1.4426950408889634))).to(gate.dtype)
    tl.store(out + row * out_stride + columns, opened * up, mask=is_there)


@triton.jit
def normed(first, second, weight, columns, is_there, eps,
    HALF: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Heads [n, PAD] as two halves, each normalised over its own values, as ``rms_norm_kernel``."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)[:, None]
    low = tl.load(weight + columns, mask=is_there, other=0.0)[None, :]
    high = tl.load(weight + HALF + columns, mask=is_there, other=0.0)[None, :]
    if OFFSET:
        one = (a * scale * (low.to(tl.float32) + 1.0)).to(first.dtype)
        other = (b * scale * (high.to(tl.float32) + 1.0)).to(first.dtype)
    else:
        one, other = (a * scale).to(first.dtype) * low, (b * scale).to(first.dtype) * high
    return one, other


@triton.jit
def turned(first, second, cos, sin):
    """Heads [n, PAD] as two halves, turned by angles [1, PAD] in float32."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    return (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)


@triton.jit(do_not_specialize=["first_unit"])
def place_kernel(
    q, k, v, q_weight, k_weight, angles, kv, entries, offsets, token_stride, first_unit, eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr,
    NORMS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """One KV head of one token into its unit, and its queries in place: normalised, then turned.

    Without ``NORMS`` nothing is normalised, and the weights are not read.
    """
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    columns = tl.arange(0, PAD)
    is_there = columns < HALF
    turn = angles + token * (2 * HALF) + columns
    cos = tl.load(turn, mask=is_there, other=0.0)[None, :]
    sin = tl.load(turn + HALF, mask=is_there, other=0.0)[None, :]

    rows = tl.arange(0, GROUP_PAD)
    is_query = (rows < GROUP)[:, None] & is_there[None, :]
    heads = kv_head * GROUP + rows
    at = q + token * token_stride + (heads * (2 * HALF))[:, None] + columns[None, :]
    first = tl.load(at, mask=is_query, other=0.0)
    second = tl.load(at + HALF, mask=is_query, other=0.0)
    if NORMS:
        first, second = normed(first, second, q_weight, columns, is_there, eps, HALF, OFFSET)
    first, second = turned(first, second, cos, sin)
    tl.store(at, first, mask=is_query)
    tl.store(at + HALF, second, mask=is_query)

    # One row, so that it goes the same way as the queries do.
    is_key = is_there[None, :]
    head = token * token_stride + kv_head * (2 * HALF) + columns[None, :]
    unit = tl.load(entries + token).to(tl.int64) + first_unit
    place = (kv_head * BLOCK_SIZE + tl.load(offsets + token)) * (2 * HALF)
    to = kv + unit * (4 * KV_HEADS * BLOCK_SIZE * HALF) + place + columns[None, :]
    first = tl.load(k + head, mask=is_key, other=0.0)
    second = tl.load(k + head + HALF, mask=is_key, other=0.0)
    if NORMS:
        first, second = normed(first, second, k_weight, columns, is_there, eps, HALF, OFFSET)
    first, second = turned(first, second, cos, sin)
    tl.store(to, first, mask=is_key)
    tl.store(to + HALF, second, mask=is_key)
    to += 2 * KV_HEADS * BLOCK_SIZE * HALF
    tl.store(to, tl.load(v + head, mask=is_key), mask=is_key)
    tl.store(to + HALF, tl.load(v + head + HALF, mask=is_key), mask=is_key)
