/* Values weighed by softmax numerators. Needs attention_span.h. */

/* 64 columns (or 32) of as many keys as 4 bytes hold, so that one dot adds them all: of each lane
 * the same column of those keys, whose rows are `stride` bytes apart. Columns are in the order that
 * costs least; `in_order` undoes it. */
#define KEYS_PER_STEP (4 / (long)sizeof(elem))
#ifdef KUN_BF16
#define QUARTERS(i) i, i + 32, i + 1, i + 33, i + 2, i + 34, i + 3, i + 35
#if PIECE < LANES
INLINE pi low_words(pi a, pi b) { return (pi)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b); }
INLINE pi high_words(pi a, pi b) { return (pi)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b); }
#elif defined(__AVX512BW__)
INLINE vi low_words(vi a, vi b) { return (vi)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b); }
INLINE vi high_words(vi a, vi b) { return (vi)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b); }
#elif defined(__clang__)
#define WORDS(i) QUARTERS(i), QUARTERS(i + 8), QUARTERS(i + 16), QUARTERS(i + 24)
INLINE vi low_words(vi a, vi b) {
  return (vi)__builtin_shufflevector((words)a, (words)b, WORDS(0));
}
INLINE vi high_words(vi a, vi b) {
  return (vi)__builtin_shufflevector((words)a, (words)b, WORDS(4));
}
#else
#define WORDS(i) (words){QUARTERS(i), QUARTERS(i + 8), QUARTERS(i + 16), QUARTERS(i + 24)}
INLINE vi low_words(vi a, vi b) { return (vi)__builtin_shuffle((words)a, (words)b, WORDS(0)); }
INLINE vi high_words(vi a, vi b) { return (vi)__builtin_shuffle((words)a, (words)b, WORDS(4)); }
#endif
#endif

INLINE void value_lanes(pi *lanes, const char *values, const long stride, const int vectors,
                        const int piece) {
  values += piece * PIECE * 4;
  UNROLL for (int j = 0; j < vectors; j += 2) {
#ifdef KUN_BF16
    pi even = *(const pi_u *)(values + j * 32);
    pi odd = *(const pi_u *)(values + j * 32 + stride);
    lanes[j] = low_words(even, odd);
    lanes[j + 1] = high_words(even, odd);
#else
    (void)stride;
    lanes[j] = *(const pi_u *)(values + j * 64);
    lanes[j + 1] = *(const pi_u *)(values + j * 64 + 64);
#endif
  }
}

/* Two vectors of columns of `value_lanes`, in order. */
INLINE void in_order(vf *two) {
#if defined(KUN_BF16) && PIECE < LANES
  halves a = {two[0]}, b = {two[1]};
  UNROLL for (int i = 0; i < 2; i++) {
    *(pf *)piece_of(two + i, 0) = (pf)_mm256_permute2f128_ps(a.of[i], b.of[i], 0x20);
    *(pf *)piece_of(two + i, 1) = (pf)_mm256_permute2f128_ps(a.of[i], b.of[i], 0x31);
  }
#elif defined(KUN_BF16)
  vi a = (vi)two[0], b = (vi)two[1];
  two[0] = (vf)SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  two[1] = (vf)SHUFFLE(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
#else
  (void)two;
#endif
}

/* Packed V: [step][dim] of those lanes. Fetches as much from `next`. */
static void pack_values(char *packed, const span_rows *values, const fetched_pair *next, long dim,
                        long keys) {
  long row_bytes = dim * (long)sizeof(elem);
  for (long i = 0; i < keys; i += KEYS_PER_STEP, packed += dim * 4) {
    const char *from = values->panels[i / PANEL] + i % PANEL * row_bytes;
    for (long d = 0; d < dim; d += 2 * LANES) {
      fetch_lines(next[i / PANEL], i % PANEL * row_bytes + d * 4, 2);
      UNROLL for (int piece = 0; piece < PIECES; piece++) {
        pi lanes[2];
        value_lanes(lanes, from + d * (long)sizeof(elem), row_bytes, 2, piece);
        *((pi_u *)(packed + d * 4) + piece) = lanes[0];
        *((pi_u *)(packed + (d + LANES) * 4) + piece) = lanes[1];
      }
    }
  }
}

#ifndef AMX_PRODUCTS /* else amx_attention.h */
/* acc = acc * rescale + weights x V, for a piece of each of `width` vectors of columns from d on. */
INLINE float *sums_at(const attention_buffers *b, long row, long d, const long dim, int piece) {
  return b->seen.acc + row * dim + d + piece * PIECE;
}
INLINE void open_sums(const int rows, const int width, pf (*acc)[4], const attention_buffers *b,
                      long row, long d, const long dim, const int piece) {
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < width; j++) {
    const pf_u *at = (const pf_u *)(sums_at(b, row + i, d, dim, piece) + j * LANES);
    acc[i][j] = *at * piece_splat(b->rescale[row + i]);
  }
}
INLINE void add_step(const int rows, const int width, pf (*acc)[4], const pi *v,
                     const weight *weights) {
#ifdef WIDENS_WEIGHTS
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int odd = 1; odd >= 0; odd--) {
    pi p = piece_spread(weights + i * SPAN + odd);
    UNROLL for (int j = 0; j < width; j++) {
      acc[i][j] = piece_dot_f32(acc[i][j], odd ? v[j] & (int32_t)0xffff0000 : v[j] << 16, p);
    }
  }
#else
  UNROLL for (int i = 0; i < rows; i++) {
    pi p = piece_spread(weights + i * SPAN);
    UNROLL for (int j = 0; j < width; j++) acc[i][j] = NAME(piece_dot)(acc[i][j], v[j], p);
  }
#endif
}
INLINE void close_sums(const int rows, const int width, pf (*acc)[4], const attention_buffers *b,
                       long row, long d, const long dim, const int piece) {
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < width; j++) {
    *(pf_u *)(sums_at(b, row + i, d, dim, piece) + j * LANES) = acc[i][j];
  }
}

#if PIECE < LANES
#define PACKED_TILE_ROWS PASS_ROWS
INLINE void packed_values_of(const int rows, const int width, const attention_buffers *b, long row,
                             long d, long dim, long keys) {
  for (int j = 0; j < width; j++, d += LANES) {
    pf acc[PIECES][PASS_ROWS][4];
    const char *weights = (const char *)(b->weights + row * SPAN), *at = b->values + d * 4;
    UNROLL for (int p = 0; p < PIECES; p++) UNROLL for (int i = 0; i < rows; i++) {
      const pf_u *sum = (const pf_u *)sums_at(b, row + i, d, dim, p);
      acc[p][i][0] = *sum * piece_splat(b->rescale[row + i]);
    }
    for (long left = keys; left > 0; left -= KEYS_PER_STEP, at += dim * 4) {
      add_slot(rows, 0, acc, 0, at, weights, SPAN * (long)sizeof(weight));
      weights += KEYS_PER_STEP * (long)sizeof(weight);
    }
    UNROLL for (int p = 0; p < PIECES; p++) UNROLL for (int i = 0; i < rows; i++) {
      *(pf_u *)sums_at(b, row + i, d, dim, p) = acc[p][i][0];
    }
  }
}
#else
#define PACKED_TILE_ROWS TILE_ROWS
INLINE void packed_values_of(const int rows, const int width, const attention_buffers *b, long row,
                             long d, long dim, long keys) {
  UNROLL for (int piece = 0; piece < PIECES; piece++) {
    pf acc[TILE_ROWS][4];
    const weight *weights = b->weights + row * SPAN;
    const char *at = b->values + d * 4 + piece * PIECE * 4;
    open_sums(rows, width, acc, b, row, d, dim, piece);
    for (long left = keys; left > 0; left -= KEYS_PER_STEP, at += dim * 4) {
      pi v[4];
      UNROLL for (int j = 0; j < width; j++) v[j] = *(const pi_u *)(at + j * 64);
      add_step(rows, width, acc, v, weights);
      weights += KEYS_PER_STEP;
    }
    close_sums(rows, width, acc, b, row, d, dim, piece);
  }
}
#endif

/* The same from V as it lies: what few rows read is not worth packing. */
INLINE void direct_piece_of(const int rows, const int width, const attention_buffers *b,
                            const span_rows *values, const fetched_pair *next, long row, long d,
                            const long dim, long keys, const int piece) {
  const long row_bytes = dim * (long)sizeof(elem);
  pf acc[TILE_ROWS][4];
  const weight *weights = b->weights + row * SPAN;
  open_sums(rows, width, acc, b, row, d, dim, piece);
  for (long i = 0; i < keys; i += PANEL) {
    const char *at = values->panels[i / PANEL] + d * (long)sizeof(elem);
    long fetched = d * (PANEL * (long)sizeof(elem));
    for (long k = 0; k < PANEL; k += KEYS_PER_STEP, at += KEYS_PER_STEP * row_bytes) {
      pi v[4];
      if (piece == 0) fetch_lines(next[i / PANEL], fetched, width);
      fetched += width * 64;
      value_lanes(v, at, row_bytes, width, piece);
      add_step(rows, width, acc, v, weights);
      weights += KEYS_PER_STEP;
    }
  }
  close_sums(rows, width, acc, b, row, d, dim, piece);
}
INLINE void direct_values_of(const int rows, const int width, const attention_buffers *b,
                             const span_rows *values, const fetched_pair *next, long row, long d,
                             const long dim, long keys) {
  UNROLL for (int piece = 0; piece < PIECES; piece++) {
    direct_piece_of(rows, width, b, values, next, row, d, dim, keys, piece);
  }
}

#if PIECE == LANES
#define PACKED_4(n) packed_values_of(n, 4, b, row, d, dim, keys)
#endif
#define PACKED_2(n) packed_values_of(n, 2, b, row, d, dim, keys)
#define DIRECT_4(n) direct_values_of(n, 4, b, values, next, row, d, dim, keys)
#define DIRECT_2(n) direct_values_of(n, 2, b, values, next, row, d, dim, keys)

static void blend_packed(int rows, const attention_buffers *b, long row, long dim, long keys) {
  long d = 0;
#if PIECE < LANES
  for (; d < dim; d += 32) {
    switch (rows) {
      case 1: PACKED_2(1); break;
      case 2: PACKED_2(2); break;
      case 3: PACKED_2(3); break;
      case 4: PACKED_2(4); break;
      case 5: PACKED_2(5); break;
      default: PACKED_2(PASS_ROWS);
    }
  }
#else
  for (; d + 64 <= dim; d += 64) WITH_CONSTANT_ROWS(rows, PACKED_4)
  for (; d < dim; d += 32) WITH_CONSTANT_ROWS(rows, PACKED_2)
#endif
}

INLINE void direct_by(int rows, const attention_buffers *b, const span_rows *values,
                      const fetched_pair *next, long row, const long dim, long keys) {
  long d = 0;
  for (; d + 64 <= dim; d += 64) WITH_CONSTANT_ROWS(rows, DIRECT_4)
  for (; d < dim; d += 32) WITH_CONSTANT_ROWS(rows, DIRECT_2)
}
static void direct_64(int rows, const attention_buffers *b, const span_rows *values,
                      const fetched_pair *next, long row, long keys) {
  direct_by(rows, b, values, next, row, 64, keys);
}
static void direct_128(int rows, const attention_buffers *b, const span_rows *values,
                       const fetched_pair *next, long row, long keys) {
  direct_by(rows, b, values, next, row, 128, keys);
}
static void direct_any(int rows, const attention_buffers *b, const span_rows *values,
                       const fetched_pair *next, long row, long dim, long keys) {
  direct_by(rows, b, values, next, row, dim, keys);
}
static void blend_direct(int rows, const attention_buffers *b, const span_rows *values,
                         const fetched_pair *next, long row, long dim, long keys) {
  if (dim == 64) direct_64(rows, b, values, next, row, keys);
  else if (dim == 128) direct_128(rows, b, values, next, row, keys);
  else direct_any(rows, b, values, next, row, dim, keys);
}
#endif
