"""Products with weights that stay quantised: tiles of them are widened where they are multiplied.

A program has a tile of the weight's rows for a tile of the tokens, and goes over all columns. The
weight is the first factor: so however many tokens there are, tensor cores take it 64 rows at a time
by the same instruction, over the same columns in the same order, and a token's sums do not depend
on what else is in the batch.
"""

import triton
import triton.language as tl


@triton.jit
def nibbles(stored, DTYPE: tl.constexpr):
    """Numbers of 0 to 15 as 8 less, exactly. In half precision by what they are as lowest bits."""
    if tl.bfloat16 == DTYPE:
        return (stored.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
    elif tl.float16 == DTYPE:
        return (stored.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    else:
        return stored.to(tl.float32) - 8.0


@triton.jit
def widened(stored, FLOATS: tl.constexpr, DTYPE: tl.constexpr):
    """Bytes as numbers, exactly: signed ones, or with ``FLOATS`` those of e4m3.

    By the device's instruction, which those before 8.9 lack; with shifts it is twice as long.
    """
    if FLOATS:
        return stored.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    return stored.to(tl.int8, bitcast=True).to(DTYPE)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def packed_kernel(
    x, values, scales, bias, out, num_tokens, num_rows, out_stride,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr,
    BIAS: tl.constexpr, ADDS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """``out`` = ``x`` times the weight transposed, plus a bias, plus with ``ADDS`` what is there.

    ``scales`` [groups, rows]: the sum over each group of columns is multiplied by one. Of 4 bits
    the first half of a group is low, the second high, and 8 stands for 0.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_row, is_token = row < num_rows, token < num_tokens
    row_at = tl.where(is_row, row, 0).to(tl.int64)
    token_at = x + tl.where(is_token, token, 0).to(tl.int64) * COLUMNS
    total = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    if BITS == 4:
        half = tl.arange(0, STEP // 2)
        at = values + row_at[:, None] * (COLUMNS // 2) + half[None, :]
        for start in range(0, COLUMNS // 2, STEP // 2):
            group = start // (GROUP // 2)
            column = group * (GROUP // 2) + start + half
            stored = tl.load(at + start)
            first = tl.load(token_at[None, :] + column[:, None])
            second = tl.load(token_at[None, :] + (column + GROUP // 2)[:, None])
            low = nibbles(stored & 15, x.dtype.element_ty)
            high = nibbles(stored >> 4, x.dtype.element_ty)
            sums = tl.dot(low, first, input_precision="ieee")
            sums = tl.dot(high, second, sums, input_precision="ieee")
            scale = tl.load(scales + group * num_rows + row_at)
            total += sums * scale.to(tl.float32)[:, None]
    else:
        column = tl.arange(0, STEP)
        at = values + row_at[:, None] * COLUMNS + column[None, :]
        for start in range(0, COLUMNS, STEP):
            if COLUMNS % STEP == 0:
                stored = tl.load(at + start)
                tokens = tl.load((token_at + start)[None, :] + column[:, None])
            else:
                is_there = start + column < COLUMNS
                stored = tl.load(at + start, mask=is_there[None, :], other=0)
                where = (token_at + start)[None, :] + column[:, None]
                tokens = tl.load(where, mask=is_there[:, None], other=0.0)
            wide = widened(stored, FLOATS, x.dtype.element_ty)
            if GROUP == COLUMNS:
                total = tl.dot(wide, tokens, total, input_precision="ieee")
            else:
                sums = tl.dot(wide, tokens, input_precision="ieee")
                scale = tl.load(scales + (start // GROUP) * num_rows + row_at)
                total += sums * scale.to(tl.float32)[:, None]
        if GROUP == COLUMNS:
            total *= tl.load(scales + row_at).to(tl.float32)[:, None]
    if BIAS:
        total += tl.load(bias + row_at).to(tl.float32)[:, None]
    to = out + token.to(tl.int64)[None, :] * out_stride + row[:, None]
    is_there = is_row[:, None] & is_token[None, :]
    if ADDS:
        total += tl.load(to, mask=is_there, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=is_there)
