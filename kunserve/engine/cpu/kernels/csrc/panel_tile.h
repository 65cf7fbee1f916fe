/* The linears' multiply-accumulate kernel: rows of x against a panel of 16 rows of w. Needs typed.h
 * and transpose.h.
 *
 * A panel is [step][slot][row][4 bytes]: step s has bytes [16 s, 16 s + 16) of each of its rows,
 * four slots of 4 bytes. So a vector has a slot of all rows, which is multiplied by the same slot of
 * a row of x in every lane. Each lane of an accumulator sums one slot over the steps, in order; then
 * the four slots are added in a fixed order. So an output is the same bits however many rows share a
 * call. A panel has exactly the bytes of its rows: matrices are put into panels in place. */
#define PANEL_STEP 256 /* bytes */

/* Factors are what products read of x. Without products of bfloat16 they are floats: x is widened
 * once for many panels, and a vector of w once for a pass. With AVX-512 they also lie in the order in
 * which a pass reads them. Elsewhere they are x as it lies. */
#if defined(KUN_BF16) && (defined(__AVX512F__) || PIECE < LANES) && !defined(HAS_BF16) && \
    !defined(AMX_LINEAR)
#define WIDENS_X
#ifdef __AVX512F__
#define ORDERS_X
#endif
typedef float factor;
#else
typedef elem factor;
#endif
#define FACTOR_STEP (16 / (long)sizeof(elem) * (long)sizeof(factor)) /* bytes of x in a step */

/* Rows of x that share a pass over a panel: their sums fill the registers. Where w is widened a pass
 * has as many as it can, because all share that; more than ALL_SLOTS_ROWS take two slots of a panel
 * at a time. With AVX2 more than TWO_SLOTS_ROWS take one. Elsewhere, from two passes on, each has at
 * least half as many: fewer would read the panel more often than memory is waited for. */
#ifdef ORDERS_X
#define PASS_ROWS 14
#define ALL_SLOTS_ROWS 7
#elif defined(__AVX512F__)
#define PASS_ROWS 7
#define LEAST_PASS_ROWS 4
#elif PIECE < LANES
#define PASS_ROWS 6
#define TWO_SLOTS_ROWS 3
#else
#define PASS_ROWS 3
#define LEAST_PASS_ROWS 2
#endif

/* Into how many passes over a panel so many rows are cut. */
INLINE int passes_of(long rows) {
#ifdef LEAST_PASS_ROWS
  return rows <= PASS_ROWS ? 1 : (int)(rows / LEAST_PASS_ROWS);
#else
  return (int)((rows + PASS_ROWS - 1) / PASS_ROWS);
#endif
}

#ifdef ORDERS_X
/* The factors of a pass: [step][slot][odd, even column][row], or slots 0 and 2 of all steps before
 * slots 1 and 3. */
static void order_pass(float *to, const elem *const *x, int rows, long k) {
  const long bytes = k * (long)sizeof(elem), pair = 2 * rows;
  const int halves = rows > ALL_SLOTS_ROWS ? 2 : 1;
  const __mmask16 those = (__mmask16)((1 << rows) - 1);
  const char *at[PANEL];
  char slots[PANEL * 64];
  for (int r = 0; r < PANEL; r++) at[r] = (const char *)x[r < rows ? r : 0];
  for (long from = 0; from < bytes; from += 64) {
    long left = bytes - from < 64 ? bytes - from : 64;
    transpose_64_bytes(slots, at, from, left);
    for (int half = 0; half < halves; half++) {
      float *at_half = to + half * (bytes / 8 * pair);
      for (long slot = half; slot < left / 4; slot += halves, at_half += pair) {
        __m512i of_all = _mm512_loadu_si512(slots + slot * 64);
        __m512i odd = _mm512_and_si512(of_all, _mm512_set1_epi32((int)0xffff0000));
        _mm512_mask_storeu_epi32(at_half, those, odd);
        _mm512_mask_storeu_epi32(at_half + rows, those, _mm512_slli_epi32(of_all, 16));
      }
    }
    to += left / 4 / halves * pair;
  }
}
#endif

/* `rows` rows of x as factors, at `to`, for `passes_of` them; those that `which` names, unless it is
 * NULL. */
INLINE void put_factors(char *restrict to, const elem *restrict x, const int32_t *which, long rows,
                        long k) {
#ifdef ORDERS_X
  int passes = passes_of(rows);
  for (int pass = 0; pass < passes; pass++) {
    const elem *of[PASS_ROWS];
    long first = rows * pass / passes, end = rows * (pass + 1) / passes;
    for (long i = first; i < end; i++) of[i - first] = x + (which ? which[i] : i) * k;
    order_pass((float *)to + first * k, of, (int)(end - first), k);
  }
#else
  for (long i = 0; i < rows; i++) {
    const elem *row = x + (which ? which[i] : i) * k;
#ifdef WIDENS_X
    uint32_t *bits = (uint32_t *)to + i * k;
    for (long c = 0; c < k; c++) bits[c] = (uint32_t)row[c] << 16;
#else
    memcpy((factor *)to + i * k, row, (size_t)k * sizeof(factor));
#endif
  }
#endif
}

/* Where rows of x lie as factors: at `to`, if it is not so already. */
INLINE const char *factors_of(char *to, const elem *x, long rows, long k) {
#ifdef WIDENS_X
  put_factors(to, x, NULL, rows, k);
  return to;
#else
  (void)to;
  (void)rows;
  (void)k;
  return (const char *)x;
#endif
}

/* What `factors_of` needs for so many elements. */
INLINE size_t factor_bytes(long count) {
#ifdef WIDENS_X
  return (size_t)count * sizeof(factor);
#else
  (void)count;
  return 0;
#endif
}

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

/* One slot of one step, of all rows and pieces: acc += w x. What is read of x serves all pieces. */
INLINE void add_slot(const int rows, pf (*acc)[PASS_ROWS][4], const int slot, const char *panel,
                     const char *x, long x_stride) {
#ifdef WIDENS_X /* the odd column first, as in `dot_bf16` */
  UNROLL for (int odd = 1; odd >= 0; odd--) {
    pi w[PIECES];
    UNROLL for (int p = 0; p < PIECES; p++) {
      w[p] = *(const pi_u *)(panel + p * PIECE * 4);
      w[p] = odd ? w[p] & (int32_t)0xffff0000 : w[p] << 16;
    }
    UNROLL for (int i = 0; i < rows; i++) {
#ifdef ORDERS_X
      pi factor_of_all = piece_spread(x + 4 * (odd ? i : rows + i));
#else
      pi factor_of_all = piece_spread(x + i * x_stride + 4 * odd);
#endif
      UNROLL for (int p = 0; p < PIECES; p++) {
        add_product(&acc[p][i][slot], w[p], factor_of_all);
      }
    }
  }
#else
  pi w[PIECES];
  UNROLL for (int p = 0; p < PIECES; p++) w[p] = *(const pi_u *)(panel + p * PIECE * 4);
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int p = 0; p < PIECES; p++) {
#ifdef KUN_BF16
    acc[p][i][slot] = piece_dot_bf16(acc[p][i][slot], w[p], piece_spread(x + i * x_stride));
#else
    add_product(&acc[p][i][slot], w[p], piece_spread(x + i * x_stride));
#endif
  }
#endif
}

/* The slots `slot`, `slot` + `each`, ...; with `each` 2 their sums are added to `out`'s. `lines` (a
 * constant) of `next` are fetched in each step. */
INLINE void panel_slots_of(const int rows, const int lines, vf *out, const char *panel,
                           const char *x, long x_stride, long steps, const char *next,
                           const int slot, const int each) {
  pf acc[PIECES][PASS_ROWS][4];
#ifdef ORDERS_X
  x += slot * steps * 16 * rows;
#endif
  UNROLL for (int p = 0; p < PIECES; p++) UNROLL for (int i = 0; i < rows; i++) {
    UNROLL for (int c = slot; c < 4; c += each) acc[p][i][c] = (pf){};
  }
  for (long s = 0; s < steps; s++, panel += PANEL_STEP) {
    if (lines == OPEN_PAGES && slot == 0) open_page(panel);
    UNROLL for (int line = 0; line < lines; line++) {
      __builtin_prefetch(next + (s * lines + line) * 64, 0, 2);
    }
    UNROLL for (int c = slot; c < 4; c += each) {
#ifdef ORDERS_X
      add_slot(rows, acc, c, panel + c * 64, x, x_stride);
      x += 8 * rows;
#else
      add_slot(rows, acc, c, panel + c * 64, x + s * FACTOR_STEP + c * (FACTOR_STEP / 4), x_stride);
#endif
    }
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
INLINE void slot_by_slot(const int rows, const int lines, vf *out, const char *panel,
                         const char *x, long x_stride, long steps, const char *next) {
  vf sums[4][PASS_ROWS];
  _Pragma("GCC unroll 1") for (int slot = 0; slot < 4; slot++) {
    pf acc[PIECES][PASS_ROWS][4];
    const char *w = panel + slot * 64, *factors = x + slot * (FACTOR_STEP / 4);
    UNROLL for (int p = 0; p < PIECES; p++) UNROLL for (int i = 0; i < rows; i++) {
      acc[p][i][0] = (pf){};
    }
    for (long s = 0; s < steps; s++, w += PANEL_STEP, factors += FACTOR_STEP) {
      if (lines > 0 && s % (lines > 0 ? 4 / lines : 1) == 0) {
        __builtin_prefetch(next, 0, 2);
        next += 64;
      }
      add_slot(rows, acc, 0, w, factors, x_stride);
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
INLINE void panel_pass_of(const int rows, const int lines, vf *out, const char *panel,
                          const char *x, long x_stride, long steps, const char *next) {
#if PIECE < LANES
  if (rows > TWO_SLOTS_ROWS) {
    slot_by_slot(rows, lines, out, panel, x, x_stride, steps, next);
    return;
  }
#endif
#ifdef ORDERS_X
  const int each = rows <= ALL_SLOTS_ROWS ? 1 : 2;
#else
  const int each = rows == 1 || PIECES == 1 ? 1 : 2;
#endif
  const int halves = PIECES > 1 && each == 2 && lines > 1;
  UNROLL for (int slot = 0; slot < each; slot++) {
    const int fetched = halves ? lines / 2 : slot == 0 || lines == OPEN_PAGES ? lines : 0;
    const char *from = halves ? next + slot * steps * fetched * 64 : next;
    panel_slots_of(rows, fetched, out, panel, x, x_stride, steps, from, slot, each);
  }
}

#define PASS(lines, rows)                                             \
  case rows:                                                          \
    panel_pass_of(rows, lines, out, panel, x, x_stride, steps, next); \
    break;
#ifdef ORDERS_X
#define MORE_PASSES(lines)                                                                  \
  PASS(lines, 4) PASS(lines, 5) PASS(lines, 6) PASS(lines, 7) PASS(lines, 8) PASS(lines, 9) \
  PASS(lines, 10) PASS(lines, 11) PASS(lines, 12) PASS(lines, 13) PASS(lines, 14)
#elif defined(__AVX512F__)
#define MORE_PASSES(lines) PASS(lines, 4) PASS(lines, 5) PASS(lines, 6) PASS(lines, 7)
#elif PIECE < LANES
#define MORE_PASSES(lines) PASS(lines, 4) PASS(lines, 5) PASS(lines, 6)
#else
#define MORE_PASSES(lines)
#endif
#define PASSES(name, lines)                                                                       \
  static void name(int rows, vf *out, const char *panel, const char *x, long x_stride, long steps, \
                   const char *next) {                                                            \
    switch (rows) {                                                                               \
      PASS(lines, 1) PASS(lines, 2) PASS(lines, 3) MORE_PASSES(lines)                             \
    }                                                                                             \
  }
PASSES(pass_opening_pages, OPEN_PAGES)
PASSES(pass_fetching_nothing, 0)
PASSES(pass_fetching_a_quarter, 1)
PASSES(pass_fetching_half, 2)
PASSES(pass_fetching_all, 4)
#undef PASSES
#undef MORE_PASSES
#undef PASS

/* Rows: up to here little but memory is waited for, and the panel is read once. */
#if PIECE < LANES
#define HARDLY_COMPUTED 1
#else
#define HARDLY_COMPUTED 5
#endif

/* out[i] = the 16 dot products of x's row i (factors, `x_stride` bytes after row i - 1) with the
 * panel, for pass `pass` of `passes`. Together the passes fetch `next`, the panel after it. */
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
