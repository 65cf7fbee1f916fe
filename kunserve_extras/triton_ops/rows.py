"""What is done to each token's row or head alone: norm, rotation, activation, and the cache."""

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
def rotate_kernel(heads, angles, token_stride, head_stride, HALF: tl.constexpr, PAD: tl.constexpr):
    """One head of one token turned in place."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PAD)
    is_there = columns < HALF
    at = heads + token * token_stride + tl.program_id(1) * head_stride + columns
    turn = angles + token * (2 * HALF) + columns
    cos = tl.load(turn, mask=is_there, other=0.0)
    sin = tl.load(turn + HALF, mask=is_there, other=0.0)
    first = tl.load(at, mask=is_there, other=0.0)
    second = tl.load(at + HALF, mask=is_there, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    tl.store(at, (a * cos - b * sin).to(first.dtype), mask=is_there)
    tl.store(at + HALF, (b * cos + a * sin).to(first.dtype), mask=is_there)


@triton.jit(do_not_specialize=["first_unit"])
def place_kernel(
    k, v, kv, entries, offsets, token_stride, first_unit,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """One head's K and V of one token, into its unit."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, PAD)
    is_there = columns < HEAD_DIM
    unit = tl.load(entries + token).to(tl.int64) + first_unit
    place = (head * BLOCK_SIZE + tl.load(offsets + token)) * HEAD_DIM
    to = kv + unit * (2 * KV_HEADS * BLOCK_SIZE * HEAD_DIM) + place + columns
    at = token * token_stride + head * HEAD_DIM + columns
    tl.store(to, tl.load(k + at, mask=is_there), mask=is_there)
    values = tl.load(v + at, mask=is_there)
    tl.store(to + KV_HEADS * BLOCK_SIZE * HEAD_DIM, values, mask=is_there)
