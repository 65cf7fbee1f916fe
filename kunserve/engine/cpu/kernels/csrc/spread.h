/* Scores of a few rows: x against 16 rows of w that lie side by side. Needs attention_span.h.
 *
 * The same products as `tile` makes, in the same order, so the same bits. But x is read
 * often and changes rarely: each 16 bytes of it lie there four times. A plain load costs nothing
 * beside products, and one that spreads takes as long as half a product. Rows are multiples of 64
 * bytes, so that no step has to ask how much is left. */
#define SPREAD_BYTES(bytes) (4 * (bytes))

/* At most so many rows, which share half a panel: two accumulators each, beside eight vectors of
 * w. */
#ifdef __AVX512F__
#define SPREAD_ROWS 10
#else
#define SPREAD_ROWS 4
#endif

INLINE void spread_rows(char *spread, const char *x, long bytes) {
  for (long at = 0; at < bytes; at += 16) {
    *(vi_u *)(spread + SPREAD_BYTES(at)) = spread_16_bytes(x + at);
  }
}

/* `quad_steps` of 64 bytes, from rows `stride` apart: a piece of each. */
INLINE void quad_at(pi *step, const char *w, const long stride, const int piece) {
#if PIECE < LANES
  w += 2 * piece * stride;
  UNROLL for (int s = 0; s < 4; s++) {
    step[s] = (pi)_mm256_loadu2_m128i((const __m128i *)(w + stride + s * 16),
                                      (const __m128i *)(w + s * 16));
  }
#elif defined(__AVX512F__)
  (void)piece;
  __m512i a = _mm512_loadu_si512(w), b = _mm512_loadu_si512(w + stride);
  __m512i c = _mm512_loadu_si512(w + 2 * stride), d = _mm512_loadu_si512(w + 3 * stride);
  __m512i ab01 = _mm512_shuffle_i32x4(a, b, 0x44), ab23 = _mm512_shuffle_i32x4(a, b, 0xee);
  __m512i cd01 = _mm512_shuffle_i32x4(c, d, 0x44), cd23 = _mm512_shuffle_i32x4(c, d, 0xee);
  step[0] = (vi)_mm512_shuffle_i32x4(ab01, cd01, 0x88);
  step[1] = (vi)_mm512_shuffle_i32x4(ab01, cd01, 0xdd);
  step[2] = (vi)_mm512_shuffle_i32x4(ab23, cd23, 0x88);
  step[3] = (vi)_mm512_shuffle_i32x4(ab23, cd23, 0xdd);
#else
  (void)piece;
  quad_steps(step, w, w + stride, w + 2 * stride, w + 3 * stride, 64);
#endif
}

/* Rows of x whose 64 bytes stay in registers while all four quads pass. */
#ifdef __AVX512F__
#define HELD_ROWS 3
#else
#define HELD_ROWS 0
#endif

/* Quads [first, first + quads) of the panel. Fetches as much from `next` as is read here, a few
 * lines after each part: many prefetches at once delay each other. */
INLINE void spread_quads(const int rows, const int first, const int quads, pf (*acc)[4],
                         const char *w, const char *spread, const long row_bytes,
                         fetched_pair next, const int piece) {
  const int together = quads == 2 ? 2 : 1; /* that share each load of x, or x stays in registers */
  pf sum[SPREAD_ROWS][4];
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int q = 0; q < quads; q++) sum[i][q] = (pf){};
  long fetched = 4 * first * row_bytes;
  for (long at = 0; at < row_bytes; at += 64, fetched += quads * 256) {
    UNROLL for (int q = 0; q < quads; q += together) {
      pi step[2][4];
      UNROLL for (int t = 0; t < together; t++) {
        if (piece == 0) fetch_lines(next, fetched + (q + t) * 256, 4);
        quad_at(step[t], w + (first + q + t) * row_bytes + at, 4 * row_bytes, piece);
      }
      UNROLL for (int s = 0; s < 4; s++) UNROLL for (int i = 0; i < rows; i++) {
        const char *x = spread + SPREAD_BYTES(i * row_bytes + at + s * 16);
        pi row = *((const pi_u *)x + piece);
        UNROLL for (int t = 0; t < together; t++) {
          sum[i][q + t] = NAME(piece_dot)(sum[i][q + t], step[t][s], row);
        }
      }
    }
  }
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int q = 0; q < quads; q++) {
    acc[i][first + q] = sum[i][q];
  }
}

INLINE void spread_of(const int rows, float *scores, const char *w, const char *spread,
                      const long row_bytes, float scale, fetched_pair next) {
  UNROLL for (int piece = 0; piece < PIECES; piece++) {
    pf acc[SPREAD_ROWS][4];
    if (rows <= HELD_ROWS) {
      spread_quads(rows, 0, 4, acc, w, spread, row_bytes, next, piece);
    } else {
      spread_quads(rows, 0, 2, acc, w, spread, row_bytes, next, piece);
      spread_quads(rows, 2, 2, acc, w, spread, row_bytes, next, piece);
    }
    UNROLL for (int i = 0; i < rows; i++) {
      *((pf_u *)(scores + i * SPAN) + piece) = add_slots_of(acc[i]) * piece_splat(scale);
    }
  }
}

INLINE void spread_by(int rows, float *scores, const char *w, const char *spread,
                      const long row_bytes, float scale, fetched_pair next) {
#define CASE(n) \
  case n: spread_of(n, scores, w, spread, row_bytes, scale, next); break;
  switch (rows) {
    CASE(1) CASE(2) CASE(3) CASE(4)
#ifdef __AVX512F__
    CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10)
#endif
  }
#undef CASE
}

/* The common lengths of rows as constants. */
static void spread_128(int rows, float *scores, const char *w, const char *spread, float scale,
                       fetched_pair next) {
  spread_by(rows, scores, w, spread, 128, scale, next);
}
static void spread_256(int rows, float *scores, const char *w, const char *spread, float scale,
                       fetched_pair next) {
  spread_by(rows, scores, w, spread, 256, scale, next);
}
static void spread_any(int rows, float *scores, const char *w, const char *spread, long row_bytes,
                       float scale, fetched_pair next) {
  spread_by(rows, scores, w, spread, row_bytes, scale, next);
}

/* scores[SPAN * i ...] = `scale` times the 16 dot products of row i with the rows of w, for i < rows
 * <= SPREAD_ROWS. */
INLINE void spread_dots(int rows, float *scores, const char *w, const char *spread, long row_bytes,
                        float scale, fetched_pair next) {
  if (row_bytes == 128) spread_128(rows, scores, w, spread, scale, next);
  else if (row_bytes == 256) spread_256(rows, scores, w, spread, scale, next);
  else spread_any(rows, scores, w, spread, row_bytes, scale, next);
}
