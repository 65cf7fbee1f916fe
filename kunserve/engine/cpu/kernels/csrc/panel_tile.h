/* The linears' multiply-accumulate kernel: rows of x against a panel of 16 rows of w. Needs typed.h
 * and transpose.h.
 *
 * A panel is [step][slot][row][4 bytes]: step s has bytes [16 s, 16 s + 16) of each of its rows,
 * four slots of 4 bytes. So a vector has a slot of all rows, which is multiplied by the same slot of
 * a row of x in every lane. Each lane of an accumulator sums one slot over the steps, in order; then
 * the four slots are added in a fixed order. So an output is the same bits however many rows share a
 * call. A panel has exactly the bytes of its rows: matrices are put into panels in place. */
#define PANEL_STEP 256 /* bytes */

/* Factors are what products read of x. With AVX-512, but without its products of bfloat16, they are
 * floats: x is widened once for many panels, and a vector of w once for a pass. Elsewhere they are x
 * as it lies. */
#if defined(KUN_BF16) && (defined(__AVX512F__) || PIECE < LANES) && !defined(__AVX512BF16__) && \
    !defined(AMX_LINEAR)
#define WIDENS_X
typedef float factor;
#else
typedef elem factor;
#endif
#define FACTOR_STEP (16 / (long)sizeof(elem) * (long)sizeof(factor)) /* bytes of x in a step */

/* `count` elements of x as factors, at `to`. */
INLINE void put_factors(char *restrict to, const elem *restrict x, long count) {
#ifdef WIDENS_X
  uint32_t *bits = (uint32_t *)to;
  for (long i = 0; i < count; i++) bits[i] = (uint32_t)x[i] << 16;
#else
  memcpy(to, x, (size_t)count * sizeof(factor));
#endif
}

/* Where x lies as factors: at `to`, if it is not so already. */
INLINE const char *factors_of(char *to, const elem *x, long count) {
#ifdef WIDENS_X
  put_factors(to, x, count);
  return to;
#else
  (void)to;
  (void)count;
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

/* Rows of x that share a pass over a panel: their sums fill the registers. From two passes on, each
 * has at least half as many: fewer would read the panel more often than memory is waited for. */
#ifdef __AVX512F__
#define PASS_ROWS 7
#define LEAST_PASS_ROWS 4
#else
#define PASS_ROWS 3
#define LEAST_PASS_ROWS 2
#endif

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
  UNROLL for (int odd = 1; odd >= 0; odd--) UNROLL for (int p = 0; p < PIECES; p++) {
    pi w = *(const pi_u *)(panel + p * PIECE * 4);
    w = odd ? w & (int32_t)0xffff0000 : w << 16;
    UNROLL for (int i = 0; i < rows; i++) {
      pi factor_of_all = piece_spread(x + i * x_stride + 4 * odd);
      acc[p][i][slot] = piece_dot_f32(acc[p][i][slot], w, factor_of_all);
    }
  }
#else
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int p = 0; p < PIECES; p++) {
    pi w = *(const pi_u *)(panel + p * PIECE * 4);
    acc[p][i][slot] = NAME(piece_dot)(acc[p][i][slot], w, piece_spread(x + i * x_stride));
  }
#endif
}

/* The slots `slot`, `slot` + `each`, ...; with `each` 2 their sums are added to `out`'s. `lines` (a
 * constant) of `next` are fetched in each step of the very first. */
INLINE void panel_slots_of(const int rows, const int lines, vf *out, const char *panel,
                           const char *x, long x_stride, long steps, const char *next,
                           const int slot, const int each) {
  pf acc[PIECES][PASS_ROWS][4];
  UNROLL for (int p = 0; p < PIECES; p++) UNROLL for (int i = 0; i < rows; i++) {
    UNROLL for (int c = slot; c < 4; c += each) acc[p][i][c] = (pf){};
  }
  for (long s = 0; s < steps; s++, panel += PANEL_STEP) {
    if (lines == OPEN_PAGES && slot == 0) open_page(panel);
    UNROLL for (int line = 0; line < lines && slot == 0; line++) {
      __builtin_prefetch(next + (s * lines + line) * 64, 0, 2);
    }
    UNROLL for (int c = slot; c < 4; c += each) {
      add_slot(rows, acc, c, panel + c * 64, x + s * FACTOR_STEP + c * (FACTOR_STEP / 4), x_stride);
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

/* One row's sums fit the registers whole, and memory is read once. Where registers are small more
 * rows take two slots at a time, so that what is read of x still serves both pieces. */
INLINE void panel_pass_of(const int rows, const int lines, vf *out, const char *panel,
                          const char *x, long x_stride, long steps, const char *next) {
  const int each = rows == 1 || PIECES == 1 ? 1 : 2;
  UNROLL for (int slot = 0; slot < each; slot++) {
    panel_slots_of(rows, lines, out, panel, x, x_stride, steps, next, slot, each);
  }
}

#define PASS(lines, rows)                                             \
  case rows:                                                          \
    panel_pass_of(rows, lines, out, panel, x, x_stride, steps, next); \
    break;
#ifdef __AVX512F__
#define MORE_PASSES(lines) PASS(lines, 4) PASS(lines, 5) PASS(lines, 6) PASS(lines, 7)
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

#define HARDLY_COMPUTED 5 /* rows: up to here little but memory is waited for */

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
