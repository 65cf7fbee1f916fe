/* The one multiply-accumulate kernel: rows of x against a packed panel of 16 rows of w.
 *
 * A packed panel is [step][quad q][row r][16 bytes]: step s holds bytes [16 s, 16 s + 16) of the
 * panel's rows {q, 4 + q, 8 + q, 12 + q}. An accumulator has one lane per (row, 4-byte slot of the
 * step), each summed over the steps in order; then the four slots are added in a fixed order. So
 * an output is the same bits however many rows share a call. Packing is scratch, redone each call.
 */
#define PANEL 16
#define STEP_BYTES (PANEL * 16)
#define DIRECT_ROWS 4

/* Rows of x that share a pass, so that the accumulators fit the registers; and `call(n)` with the
 * number of rows a compile-time constant. */
#ifdef __AVX512F__
#define TILE_ROWS 6
#define WITH_CONSTANT_ROWS(rows, call) \
  switch (rows) {                      \
    case 1: call(1); break;            \
    case 2: call(2); break;            \
    case 3: call(3); break;            \
    case 4: call(4); break;            \
    case 5: call(5); break;            \
    case 6: call(6); break;            \
  }
#else
#define TILE_ROWS 2
#define WITH_CONSTANT_ROWS(rows, call) \
  switch (rows) {                      \
    case 1: call(1); break;            \
    case 2: call(2); break;            \
  }
#endif

INLINE vi load_bytes(const char *p, long count) {
  if (count >= 64) return *(const vi_u *)p;
  vi v = {};
  memcpy(&v, p, (size_t)count);
  return v;
}

/* The next `steps` (at most 4) steps of quad q, from the four rows at `a`, `b`, `c` and `d`. */
INLINE void quad_steps(vi *step, const char *a_at, const char *b_at, const char *c_at,
                       const char *d_at, long left) {
  vi a = load_bytes(a_at, left), b = load_bytes(b_at, left);
  vi c = load_bytes(c_at, left), d = load_bytes(d_at, left);
  vi ab01 = SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  vi cd01 = SHUFFLE(c, d, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  vi ab23 = SHUFFLE(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  vi cd23 = SHUFFLE(c, d, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  step[0] = SHUFFLE(ab01, cd01, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
  step[1] = SHUFFLE(ab01, cd01, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  step[2] = SHUFFLE(ab23, cd23, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
  step[3] = SHUFFLE(ab23, cd23, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

/* Each kernel can pull what is needed next into the L2 cache as it goes, spread evenly so that
 * memory never rests: `next` points to the rows of the next panel (NULL for none). Not into L1,
 * where it would push out the packed panel. */
INLINE void fetch(const char *const *next, int rows, long at) {
  UNROLL for (int r = 0; r < rows; r++) __builtin_prefetch(next[r] + at, 0, 2);
}

/* Pack the 16 rows of `row_bytes` (a multiple of 16) bytes that `rows` point to, while fetching
 * the first `num_next` (a multiple of 4) of the next ones. */
INLINE void pack_panel(char *packed, const char *const *rows, long row_bytes,
                       const char *const *next, int num_next) {
  for (long at = 0; at < row_bytes; at += 64) {
    long left = row_bytes - at;
    for (int r = 0; r < num_next; r += 4) fetch(next + r, 4, at);
    UNROLL for (int q = 0; q < 4; q++) {
      vi step[4];
      char *out = packed + at * PANEL + q * 64;
      quad_steps(step, rows[q] + at, rows[4 + q] + at, rows[8 + q] + at, rows[12 + q] + at, left);
      UNROLL for (int s = 0; s < 4; s++) {
        if (left > s * 16) *(vi_u *)(out + s * STEP_BYTES) = step[s];
      }
    }
  }
}

/* Add each accumulator's four slots: lane 4 r + q of the result is quad q's row r. */
INLINE vf add_slots(const vf *acc) {
  vi a = (vi)acc[0], b = (vi)acc[1], c = (vi)acc[2], d = (vi)acc[3];
  vf ab = (vf)SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
          (vf)SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  vf cd = (vf)SHUFFLE(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
          (vf)SHUFFLE(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  vi e = (vi)ab, f = (vi)cd;
  return (vf)SHUFFLE(e, f, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
         (vf)SHUFFLE(e, f, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}

INLINE void tile_of(const int rows, vf *out, const char *packed, const char *x, long x_stride,
                    long steps, const char *const *next) {
  vf acc[TILE_ROWS][4];
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int q = 0; q < 4; q++) acc[i][q] = (vf){};
  for (long s = 0; s < steps; s++) {
    vi w[4];
    if (next != NULL) fetch(next + s % 4, 1, s / 4 * 64);
    UNROLL for (int q = 0; q < 4; q++) w[q] = *(const vi_u *)(packed + s * STEP_BYTES + q * 64);
    UNROLL for (int i = 0; i < rows; i++) {
      vi row = spread_16_bytes(x + i * x_stride + s * 16);
      UNROLL for (int q = 0; q < 4; q++) acc[i][q] = dot(acc[i][q], w[q], row);
    }
  }
  UNROLL for (int i = 0; i < rows; i++) out[i] = add_slots(acc[i]);
}

/* out[i] = the 16 dot products of x's row i with the panel, for i < rows <= TILE_ROWS. Fetches four
 * rows. */
static void tile(int rows, vf *out, const char *packed, const char *x, long x_stride, long steps,
                 const char *const *next) {
#define CALL(n) tile_of(n, out, packed, x, x_stride, steps, next)
  WITH_CONSTANT_ROWS(rows, CALL)
#undef CALL
}

/* The same for a few rows of x, straight from the panel's 16 rows of w: what is read once is not
 * worth packing. Same order of additions, same bits. */
INLINE void direct_of(const int rows, vf *out, const char *const *w_rows, const char *x,
                      long x_stride, long row_bytes, const char *const *next) {
  vf acc[DIRECT_ROWS][4];
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int q = 0; q < 4; q++) acc[i][q] = (vf){};
  for (long at = 0; at < row_bytes; at += 64) {
    long left = row_bytes - at;
    UNROLL for (int q = 0; q < 4; q += 2) { /* two quads share each load of x */
      vi even[4], odd[4];
      quad_steps(even, w_rows[q] + at, w_rows[4 + q] + at, w_rows[8 + q] + at, w_rows[12 + q] + at,
                 left);
      quad_steps(odd, w_rows[q + 1] + at, w_rows[5 + q] + at, w_rows[9 + q] + at,
                 w_rows[13 + q] + at, left);
      UNROLL for (int s = 0; s < 4; s++) {
        if (next != NULL) fetch(next + 4 * q + 2 * s, 2, at);
        if (left <= s * 16) continue;
        UNROLL for (int i = 0; i < rows; i++) {
          vi row = spread_16_bytes(x + i * x_stride + at + s * 16);
          acc[i][q] = dot(acc[i][q], even[s], row);
          acc[i][q + 1] = dot(acc[i][q + 1], odd[s], row);
        }
      }
    }
  }
  UNROLL for (int i = 0; i < rows; i++) out[i] = add_slots(acc[i]);
}

static void direct(int rows, vf *out, const char *const *w_rows, const char *x, long x_stride,
                   long row_bytes, const char *const *next) {
  switch (rows) {
    case 1: direct_of(1, out, w_rows, x, x_stride, row_bytes, next); break;
    case 2: direct_of(2, out, w_rows, x, x_stride, row_bytes, next); break;
    case 3: direct_of(3, out, w_rows, x, x_stride, row_bytes, next); break;
    case 4: direct_of(4, out, w_rows, x, x_stride, row_bytes, next); break;
  }
}

/* Rows of x that a sweep over half a panel takes: two accumulators each, beside eight vectors of
 * w. */
#ifdef __AVX512F__
#define SWEEP_ROWS 10
#else
#define SWEEP_ROWS 4
#endif

/* Half of a panel (quads `pair` and `pair` + 1) against `rows` rows of x, for the `left` bytes (64,
 * or fewer at the end) that start at `at`; what w's rows become is kept in `packed`, unless NULL. */
INLINE void sweep_step(const int rows, vf (*sum)[2], char *packed, const char *const *w,
                       const char *x, long x_stride, long at, const long left) {
  vi even[4], odd[4];
  quad_steps(even, w[0] + at, w[4] + at, w[8] + at, w[12] + at, left);
  quad_steps(odd, w[1] + at, w[5] + at, w[9] + at, w[13] + at, left);
  UNROLL for (int s = 0; s < 4; s++) {
    if (left <= s * 16) continue;
    if (packed != NULL) {
      *(vi_u *)(packed + at * PANEL + s * STEP_BYTES) = even[s];
      *(vi_u *)(packed + at * PANEL + s * STEP_BYTES + 64) = odd[s];
    }
    UNROLL for (int i = 0; i < rows; i++) {
      vi row = spread_16_bytes(x + i * x_stride + at + s * 16);
      sum[i][0] = dot(sum[i][0], even[s], row);
      sum[i][1] = dot(sum[i][1], odd[s], row);
    }
  }
}

/* All of it, while fetching `num_next` (an even number) of the next rows. The vectors of w are put
 * in order while others are multiplied, which takes hardly more time than the products alone. */
INLINE void sweep_of(const int rows, vf (*acc)[4], char *packed, const char *const *w,
                     const char *x, long x_stride, long row_bytes, const char *const *next,
                     int num_next) {
  vf sum[SWEEP_ROWS][2];
  long at = 0;
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int q = 0; q < 2; q++) sum[i][q] = (vf){};
  for (; at + 64 <= row_bytes; at += 64) {
    for (int r = 0; r < num_next; r += 2) fetch(next + r, 2, at);
    sweep_step(rows, sum, packed, w, x, x_stride, at, 64);
  }
  if (at < row_bytes) sweep_step(rows, sum, packed, w, x, x_stride, at, row_bytes - at);
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int q = 0; q < 2; q++) acc[i][q] = sum[i][q];
}

INLINE void sweep_some(int rows, vf (*acc)[4], char *packed, const char *const *w, const char *x,
                       long x_stride, long row_bytes, const char *const *next, int num_next) {
#define CASE(n)                                                                      \
  case n:                                                                            \
    sweep_of(n, acc, packed, w, x, x_stride, row_bytes, next, num_next); \
    break;
  switch (rows) {
    CASE(1) CASE(2) CASE(3) CASE(4)
#ifdef __AVX512F__
    CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10)
#endif
  }
#undef CASE
}

/* out[i] = the 16 dot products of x's row i with the panel, for i < rows <= SWEEP_ROWS, straight
 * from w's rows. The panel is packed on the way, unless `packed` is NULL. Same order of additions,
 * same bits. */
static void sweep(int rows, vf *out, char *packed, const char *const *w_rows, const char *x,
                  long x_stride, long row_bytes, const char *const *next, int num_next) {
  vf acc[SWEEP_ROWS][4];
  int half = num_next / 4 * 2;
  for (int pair = 0; pair < 2; pair++, next += half, half = num_next - half) {
    vf(*to)[4] = (vf(*)[4])&acc[0][2 * pair];
    const char *const *w = w_rows + 2 * pair;
    if (packed == NULL) sweep_some(rows, to, NULL, w, x, x_stride, row_bytes, next, half);
    else sweep_some(rows, to, packed + 128 * pair, w, x, x_stride, row_bytes, next, half);
  }
  for (int i = 0; i < rows; i++) out[i] = add_slots(acc[i]);
}
