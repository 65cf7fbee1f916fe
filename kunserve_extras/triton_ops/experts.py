"""Experts in grouped products: pairs of a token and an expert, ordered by expert on the device.

Weights are the left side of a product and tokens the right one, because tensor cores take 64 rows
or more of the left side, and a step of single tokens has few for each expert. Sums run over pieces
of one length from the first on, so a token's do not depend on the tile that it is in, nor on how
many tokens a tile holds.

Grids follow from shapes alone, so steps can be recorded: programs of tiles that nobody has end.
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def piece(at, outer, is_outer, first, WIDTH: tl.constexpr, PIECE: tl.constexpr):
    """[n, PIECE] columns from ``first`` on, of the rows that begin ``outer`` [n] behind ``at``."""
    columns = first + tl.arange(0, PIECE)
    is_there = is_outer[:, None]
    if WIDTH % PIECE != 0:
        is_there = is_there & (columns < WIDTH)[None, :]
    return tl.load(at + outer[:, None] + columns[None, :], mask=is_there, other=0.0)


@triton.jit
def tile_of(starts, tile, EXPERTS: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr):
    """Whose tile it is: (expert, its first pair, where the expert's pairs end).

    An expert's tiles are numbered from starts[e] // ROWS + e on. Those that are nobody's begin
    where the expert before them has ended.
    """
    experts = tl.arange(0, PAD)
    begins = tl.load(starts + experts, mask=experts < EXPERTS, other=0) // ROWS + experts
    expert = tl.sum(((begins <= tile) & (experts < EXPERTS)).to(tl.int32), axis=0) - 1
    start = tl.load(starts + expert)
    first = start + (tile - (start // ROWS + expert)) * ROWS
    return expert, first, tl.load(starts + expert + 1)


@triton.jit(do_not_specialize=["num_rows"])
def router_kernel(
    x, router, logits, num_rows,
    LOGITS: tl.constexpr, HIDDEN: tl.constexpr,
    OUTS: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """``OUTS`` logits of ``ROWS`` tokens, in float32."""
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_out, is_row = outs < LOGITS, rows < num_rows
    sums = tl.zeros((OUTS, ROWS), dtype=tl.float32)
    for first in range(0, HIDDEN, PIECE):
        weights = piece(router, outs * HIDDEN, is_out, first, HIDDEN, PIECE)
        values = piece(x, rows * HIDDEN, is_row, first, HIDDEN, PIECE)
        sums = tl.dot(weights, tl.trans(values), sums, input_precision="ieee")
    to = logits + rows[None, :] * LOGITS + outs[:, None]
    tl.store(to, sums, mask=is_out[:, None] & is_row[None, :])


@triton.jit
def choose_kernel(
    logits, chosen, shares,
    LOGITS: tl.constexpr, EXPERTS: tl.constexpr, PAD: tl.constexpr, CHOICES: tl.constexpr,
    NORMALISED: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """One token's experts, of equal ones the first, ascending. Any logits give valid numbers."""
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, PAD)
    is_there = experts < EXPERTS
    own = tl.load(logits + token * LOGITS + experts, mask=is_there, other=float("-inf"))
    rank = tl.zeros((PAD,), dtype=tl.int32)
    for first in range(0, EXPERTS, PIECE):
        others = first + tl.arange(0, PIECE)
        is_other = others < EXPERTS
        theirs = tl.load(logits + token * LOGITS + others, mask=is_other, other=float("-inf"))
        is_before = (theirs[None, :] == own[:, None]) & (others[None, :] < experts[:, None])
        is_better = ((theirs[None, :] > own[:, None]) | is_before) & is_other[None, :]
        rank += tl.sum(is_better.to(tl.int32), axis=1)
    # What is no number is behind nothing, so that more than enough may be chosen.
    is_chosen = (rank < CHOICES) & is_there
    places = tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    is_chosen = is_chosen & (places < CHOICES)
    weights = tl.exp2((own - tl.max(own, axis=0)) * _LOG2_E)
    if NORMALISED:
        total = tl.sum(tl.where(is_chosen, weights, 0.0), axis=0)
    else:
        total = tl.sum(tl.where(is_there, weights, 0.0), axis=0)
    to = token * CHOICES + places
    tl.store(chosen + to, experts, mask=is_chosen)
    tl.store(shares + to, weights / total, mask=is_chosen)


@triton.jit(do_not_specialize=["num_pairs", "first_expert"])
def order_kernel(
    chosen, pairs, starts, num_pairs, first_expert,
    EXPERTS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The pairs of one held expert, ascending, behind those of the held experts before it."""
    own = tl.program_id(0)
    expert = first_expert + own
    before = tl.zeros((PIECE,), dtype=tl.int32)
    for first in range(0, num_pairs, PIECE):
        at = first + tl.arange(0, PIECE)
        which = tl.load(chosen + at, mask=at < num_pairs, other=-1)
        before += ((which >= first_expert) & (which < expert)).to(tl.int32)
    end = tl.sum(before, axis=0)
    tl.store(starts + own, end)
    for first in range(0, num_pairs, PIECE):
        at = first + tl.arange(0, PIECE)
        is_own = tl.load(chosen + at, mask=at < num_pairs, other=-1) == expert
        places = end + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
        tl.store(pairs + places, at, mask=is_own)
        end += tl.sum(is_own.to(tl.int32), axis=0)
    if own == EXPERTS - 1:
        tl.store(starts + EXPERTS, end)


@triton.jit
def gate_kernel(
    x, gate_up, gated, pairs, starts,
    EXPERTS: tl.constexpr, PAD: tl.constexpr, CHOICES: tl.constexpr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr,
    OUTS: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """The activation of gate, times up, of ``OUTS`` inner values for a tile of one expert's pairs.

    Rounded as ``gate_mul_kernel`` does after a product of its own.
    """
    expert, first_row, end = tile_of(starts, tl.program_id(1), EXPERTS, PAD, ROWS)
    if first_row < end:
        at = first_row + tl.arange(0, ROWS)
        is_row = at < end
        tokens = tl.load(pairs + at, mask=is_row, other=0) // CHOICES
        rows = tokens.to(tl.int64) * HIDDEN
        outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
        is_out = outs < INNER
        own = gate_up + expert.to(tl.int64) * (2 * INNER * HIDDEN)
        gate = tl.zeros((OUTS, ROWS), dtype=tl.float32)
        up = tl.zeros((OUTS, ROWS), dtype=tl.float32)
        for first in range(0, HIDDEN, PIECE):
            values = tl.trans(piece(x, rows, is_row, first, HIDDEN, PIECE))
            of_gate = piece(own, outs * HIDDEN, is_out, first, HIDDEN, PIECE)
            gate = tl.dot(of_gate, values, gate, input_precision="ieee")
            of_up = piece(own + INNER * HIDDEN, outs * HIDDEN, is_out, first, HIDDEN, PIECE)
            up = tl.dot(of_up, values, up, input_precision="ieee")
        wide = gate.to(x.dtype.element_ty).to(tl.float32)
        slope = wide
        if GELU:  # by tanh, as gate_mul_kernel does
            slope = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
        opened = (wide / (1.0 + tl.exp2(slope * -_LOG2_E))).to(x.dtype.element_ty)
        to = gated + at.to(tl.int64)[:, None] * INNER + outs[None, :]
        found = tl.trans(opened * up.to(x.dtype.element_ty))
        tl.store(to, found, mask=is_row[:, None] & is_out[None, :])


@triton.jit
def down_kernel(
    gated, down, products, pairs, starts,
    EXPERTS: tl.constexpr, PAD: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    OUTS: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """``OUTS`` outputs for a tile of one expert's pairs, each written where its pair lies."""
    expert, first_row, end = tile_of(starts, tl.program_id(1), EXPERTS, PAD, ROWS)
    if first_row < end:
        at = first_row + tl.arange(0, ROWS)
        is_row = at < end
        outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
        is_out = outs < HIDDEN
        own = down + expert.to(tl.int64) * (HIDDEN * INNER)
        rows = at.to(tl.int64) * INNER
        sums = tl.zeros((OUTS, ROWS), dtype=tl.float32)
        for first in range(0, INNER, PIECE):
            values = tl.trans(piece(gated, rows, is_row, first, INNER, PIECE))
            weights = piece(own, outs * INNER, is_out, first, INNER, PIECE)
            sums = tl.dot(weights, values, sums, input_precision="ieee")
        places = tl.load(pairs + at, mask=is_row, other=0).to(tl.int64)
        to = products + places[:, None] * HIDDEN + outs[None, :]
        found = tl.trans(sums.to(products.dtype.element_ty))
        tl.store(to, found, mask=is_row[:, None] & is_out[None, :])


@triton.jit(do_not_specialize=["first_expert"])
def sum_kernel(
    products, shared, chosen, shares, logits, out, first_expert,
    EXPERTS: tl.constexpr, CHOICES: tl.constexpr, LOGITS: tl.constexpr, WIDTH: tl.constexpr,
    SHARED: tl.constexpr, ADDS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """A piece of one token's sum over its held experts, ascending, in float32; the shared one last.

    ``ADDS`` it to ``out``, rounded first; without it is written there. Without ``SHARED`` that is
    not read.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    is_there = columns < WIDTH
    sums = tl.zeros((PIECE,), dtype=tl.float32)
    for place in tl.static_range(CHOICES):
        pair = token * CHOICES + place
        own = tl.load(chosen + pair) - first_expert
        is_held = (own >= 0) & (own < EXPERTS)
        at = products + pair * WIDTH + columns
        part = tl.load(at, mask=is_there & is_held, other=0.0).to(tl.float32)
        sums += tl.where(is_held, part * tl.load(shares + pair), 0.0)
    if SHARED:
        logit = tl.load(logits + token * LOGITS + LOGITS - 1)
        part = tl.load(shared + token * WIDTH + columns, mask=is_there, other=0.0)
        sums += part.to(tl.float32) / (1.0 + tl.exp2(logit * -_LOG2_E))
    to = out + token * WIDTH + columns
    if ADDS:
        before = tl.load(to, mask=is_there, other=0.0)
        tl.store(to, before + sums.to(before.dtype), mask=is_there)
    else:
        tl.store(to, sums, mask=is_there)
