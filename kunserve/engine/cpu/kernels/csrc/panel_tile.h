/* The linears' multiply-accumulate kernel: rows of x against a panel of 16 rows of w. Needs typed.h
 * and factors.h.
 *
 * A panel is [step][slot][row][4 bytes]: step s has bytes [16 s, 16 s + 16) of each of its rows,
 * four slots of 4 bytes. So a vector has a slot of all rows, which is multiplied by the same slot of
 * a row of x in every lane. Each lane of an accumulator sums one slot over the steps, in order; then
 * the four slots are added in a fixed order. So an output is the same bits however many rows share a
 * call. A panel has exactly the bytes of its rows: matrices are put into panels in place. */
#define PANEL_STEP 256 /* bytes */

/* What a pass pulls into the L2 cache meanwhile. A processor's own prefetching reads one run of
 * memory fastest while it is hardly computed with; it only stops at the end of each page. */
#define OPEN_PAGES (-1)
#define PAGE_BYTES 4096

/* At the beginning of a page, begin with one that is read later. */
INLINE void open_page(const char *at) {
  if (((uintptr_t)at & (PAGE_BYTES - 1)) >= PANEL_STEP) return;
  __builtin_prefetch(at + 3 * PAGE_BYTES, 0, 2);
  __builtin_prefetch(at + 3 * PAGE_BYTES + 64, 0, 2);
}

/* One slot of one step, of all rows and pieces: acc += w x. What is read of x serves all pieces. Its
 * factors are `ordered`, or those of a row lie `x_stride` bytes after those of the row before. */
INLINE void add_slot(const int rows, const int ordered, pf (*acc)[PASS_ROWS][4], const int slot,
                     const char *panel, const char *x, long x_stride) {
#ifdef WIDENS_X /* the odd column first, as in `dot_bf16` */
  UNROLL for (int odd = 1; odd >= 0; odd--) {
    pi w[PIECES];
    UNROLL for (int p = 0; p < PIECES; p++) {
      w[p] = *(const pi_u *)(panel + p * PIECE * 4);
      w[p] = odd ? w[p] & (int32_t)0xffff0000 : w[p] << 16;
    }
    UNROLL for (int i = 0; i < rows; i++) {
      long at = ordered ? 4 * (odd ? i : rows + i) : i * x_stride + 4 * odd;
      pi factor_of_all = piece_spread(x + at);
      UNROLL for (int p = 0; p < PIECES; p++) {
        add_product(&acc[p][i][slot], w[p], factor_of_all);
      }
    }
  }
#else
  pi w[PIECES];
  UNROLL for (int p = 0; p < PIECES; p++) w[p] = *(const pi_u *)(panel + p * PIECE * 4);
  UNROLL for (int i = 0; i < rows; i++) {
    pi factor_of_all = piece_spread(x + i * (ordered ? 4 : x_stride));
    UNROLL for (int p = 0; p < PIECES; p++) {
#ifdef KUN_BF16
      acc[p][i][slot] = piece_dot_bf16(acc[p][i][slot], w[p], factor_of_all);
#else
      add_product(&acc[p][i][slot], w[p], factor_of_all);
#endif
    }
  }
#endif
}

/* The slots `slot`, `slot` + `each`, ...; with `each` 2 their sums are added to `out`'s. `lines` (a
 * constant) of `next` are fetched in each step. */
INLINE void panel_slots_of(const int rows, const int lines, const int ordered, vf *out,
                           const char *panel, const char *x, long x_stride, long steps,
                           const char *next, const int slot, const int each) {
  pf acc[PIECES][PASS_ROWS][4];
  const long of_all = ordered ? rows : 1, turn = FACTOR_STEP / each * of_all;
  x += ordered ? slot * steps * turn : slot * FACTOR_SLOT;
  UNROLL for (int p = 0; p < PIECES; p++) UNROLL for (int i = 0; i < rows; i++) {
    UNROLL for (int c = slot; c < 4; c += each) acc[p][i][c] = (pf){};
  }
  for (long s = 0; s < steps; s++, panel += PANEL_STEP) {
    if (lines == OPEN_PAGES && slot == 0) open_page(panel);
    UNROLL for (int line = 0; line < lines; line++) {
      __builtin_prefetch(next + (s * lines + line) * 64, 0, 2);
    }
    UNROLL for (int c = slot; c < 4; c += each) {
      const char *factors = x + (ordered ? c / each * FACTOR_SLOT * rows : (c - slot) * FACTOR_SLOT);
      add_slot(rows, ordered, acc, c, panel + c * 64, factors, x_stride);
    }
    x += ordered ? turn : FACTOR_STEP;
  }
  UNROLL for (int p = 0; p < PIECES; p++) UNROLL for (int i = 0; i < rows; i++) {
    pf *sums = acc[p][i];
    pf_u *to = piece_of(out + i, p);
    if (each == 1) *to = (sums[0] + sums[2]) + (sums[1] + sums[3]);
    else if (slot == 0) *to = sums[0] + sums[2];
    else *to += sums[1] + sums[3];
  }
}

#if PIECE < LANES
/* As many rows as the registers can sum one slot of: what is widened of w serves them all, and what
 * is read of x both pieces. What is to be fetched is spread evenly over the slots. */
INLINE void slot_by_slot(const int rows, const int lines, const int ordered, vf *out,
                         const char *panel, const char *x, long x_stride, long steps,
                         const char *next) {
  const long step = ordered ? FACTOR_SLOT * rows : FACTOR_STEP;
  vf sums[4][PASS_ROWS];
  _Pragma("GCC unroll 1") for (int slot = 0; slot < 4; slot++) {
    pf acc[PIECES][PASS_ROWS][4];
    const char *w = panel + slot * 64, *factors = x + slot * (ordered ? steps * step : FACTOR_SLOT);
    UNROLL for (int p = 0; p < PIECES; p++) UNROLL for (int i = 0; i < rows; i++) {
      acc[p][i][0] = (pf){};
    }
    for (long s = 0; s < steps; s++, w += PANEL_STEP, factors += step) {
      if (lines > 0 && s % (lines > 0 ? 4 / lines : 1) == 0) {
        __builtin_prefetch(next, 0, 2);
        next += 64;
      }
      add_slot(rows, ordered, acc, 0, w, factors, x_stride);
    }
    UNROLL for (int p = 0; p < PIECES; p++) UNROLL for (int i = 0; i < rows; i++) {
      *piece_of(&sums[slot][i], p) = acc[p][i][0];
    }
  }
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int p = 0; p < PIECES; p++) {
    pf even = *piece_of(&sums[0][i], p) + *piece_of(&sums[2][i], p);
    *piece_of(out + i, p) = even + (*piece_of(&sums[1][i], p) + *piece_of(&sums[3][i], p));
  }
}
#endif

/* One row's sums fit the registers whole, and memory is read once. Where registers are small more
 * rows take two slots at a time, so that what is read of x still serves both pieces. Then the panel
 * is read twice, and each time fetches half of what is to be fetched, so that memory never rests. */
INLINE void panel_pass_of(const int rows, const int lines, const int ordered, vf *out,
                          const char *panel, const char *x, long x_stride, long steps,
                          const char *next) {
#if PIECE < LANES
  if (turns_of(rows) == 4) {
    slot_by_slot(rows, lines, ordered, out, panel, x, x_stride, steps, next);
    return;
  }
#endif
  const int each = turns_of(rows);
  const int halves = PIECES > 1 && each == 2 && lines > 1;
  UNROLL for (int slot = 0; slot < each; slot++) {
    const int fetched = halves ? lines / 2 : slot == 0 || lines == OPEN_PAGES ? lines : 0;
    const char *from = halves ? next + slot * steps * fetched * 64 : next;
    panel_slots_of(rows, fetched, ordered, out, panel, x, x_stride, steps, from, slot, each);
  }
}

#define PASS(lines, ordered, rows)                                             \
  case rows:                                                                   \
    panel_pass_of(rows, lines, ordered, out, panel, x, x_stride, steps, next); \
    break;
#define PASSES_1_TO_3(lines, ordered) \
  PASS(lines, ordered, 1) PASS(lines, ordered, 2) PASS(lines, ordered, 3)
#define PASSES_4_TO_6(lines, ordered) \
  PASS(lines, ordered, 4) PASS(lines, ordered, 5) PASS(lines, ordered, 6)
#if PIECE < LANES
#define MORE_PASSES(lines, ordered) PASSES_4_TO_6(lines, ordered)
#elif defined(ORDERS_X)
#define MORE_PASSES(lines, ordered)                                                    \
  PASSES_4_TO_6(lines, ordered) PASS(lines, ordered, 7)                                \
  PASS(lines, ordered, 8) PASS(lines, ordered, 9) PASS(lines, ordered, 10)             \
  PASS(lines, ordered, 11) PASS(lines, ordered, 12) PASS(lines, ordered, 13)           \
  PASS(lines, ordered, 14)
#elif defined(__AVX512F__)
#define MORE_PASSES(lines, ordered) PASSES_4_TO_6(lines, ordered) PASS(lines, ordered, 7)
#else
#define MORE_PASSES(lines, ordered)
#endif
#define PASSES(name, lines, ordered)                                                              \
  static void name(int rows, vf *out, const char *panel, const char *x, long x_stride, long steps, \
                   const char *next) {                                                            \
    switch (rows) { PASSES_1_TO_3(lines, ordered) MORE_PASSES(lines, ordered) }                   \
  }
#ifdef ORDERS_X
#define ORDERED 1
#else
#define ORDERED 0
#endif
PASSES(pass_opening_pages, OPEN_PAGES, ORDERED)
PASSES(pass_fetching_nothing, 0, ORDERED)
PASSES(pass_fetching_a_quarter, 1, ORDERED)
PASSES(pass_fetching_half, 2, ORDERED)
PASSES(pass_fetching_all, 4, ORDERED)
#if PIECE < LANES && !defined(AMX_PRODUCTS)
PASSES(pass_of_rows, 0, 0) /* of factors as `put_rows` leaves them */
#endif
#undef PASSES
#undef MORE_PASSES
#undef PASSES_4_TO_6
#undef PASSES_1_TO_3
#undef PASS

/* Rows: up to here little but memory is waited for, and the panel is read once. */
#if PIECE < LANES
#define HARDLY_COMPUTED 1
#else
#define HARDLY_COMPUTED 5
#endif

/* out[i] = the 16 dot products of x's row i (factors; unless they are ordered, `x_stride` bytes after
 * row i - 1) with the panel, for pass `pass` of `passes`. Together the passes fetch `next`, the panel
 * after it. */
INLINE void panel_tile(int pass, int passes, int rows, vf *out, const char *panel, const char *x,
                       long x_stride, long row_bytes, const char *next) {
  long steps = row_bytes / 16;
  if (passes == 1 && rows <= HARDLY_COMPUTED) {
    pass_opening_pages(rows, out, panel, x, x_stride, steps, next);
  } else if (passes == 1) {
    pass_fetching_all(rows, out, panel, x, x_stride, steps, next);
  } else if (passes <= 3 && pass < 2) {
    next += pass * row_bytes * (PANEL / 2);
    pass_fetching_half(rows, out, panel, x, x_stride, steps, next);
  } else if (passes > 3 && pass < 4) {
    next += pass * row_bytes * (PANEL / 4);
    pass_fetching_a_quarter(rows, out, panel, x, x_stride, steps, next);
  } else {
    pass_fetching_nothing(rows, out, panel, x, x_stride, steps, next);
  }
}
