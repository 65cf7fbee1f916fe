/* 16 rows of a matrix, 64 bytes of each at a time, into vectors whose lanes are rows. */
#include "pieces.h"

#define PANEL 16 /* rows */

INLINE vi load_bytes(const char *p, long count) {
  if (count >= 64) return *(const vi_u *)p;
  vi v = {};
  memcpy(&v, p, (size_t)count);
  return v;
}

/* The next `steps` (at most 4) steps of quad q, from the four rows at `a`, `b`, `c` and `d`. */
INLINE void quad_steps(vi *step, const char *a_at, const char *b_at, const char *c_at,
                       const char *d_at, long left) {
#if PIECE < LANES /* plain copies are what gcc does best there */
  const char *const from[4] = {a_at, b_at, c_at, d_at};
  UNROLL for (int s = 0; s < 4; s++) UNROLL for (int row = 0; row < 4; row++) {
    const quarter none = {};
    ((quarter *)&step[s])[row] = left > s * 16 ? *(const quarter *)(from[row] + s * 16) : none;
  }
#else
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
#endif
}

#if PIECE < LANES
/* 32 bytes of each of 8 rows: 4 of all of them every 64 bytes of `to`. */
INLINE void transpose_32_bytes(char *to, const char *const *rows, long at) {
  __m256 row[8], pair[8], four[8];
  UNROLL for (int r = 0; r < 8; r++) row[r] = _mm256_loadu_ps((const float *)(rows[r] + at));
  UNROLL for (int r = 0; r < 8; r += 2) {
    pair[r] = _mm256_unpacklo_ps(row[r], row[r + 1]);
    pair[r + 1] = _mm256_unpackhi_ps(row[r], row[r + 1]);
  }
  UNROLL for (int r = 0; r < 8; r += 4) UNROLL for (int i = 0; i < 2; i++) {
    four[r + 2 * i] = _mm256_shuffle_ps(pair[r + i], pair[r + i + 2], 0x44);
    four[r + 2 * i + 1] = _mm256_shuffle_ps(pair[r + i], pair[r + i + 2], 0xee);
  }
  UNROLL for (int c = 0; c < 4; c++) {
    __m256 low = _mm256_permute2f128_ps(four[c], four[c + 4], 0x20);
    __m256 high = _mm256_permute2f128_ps(four[c], four[c + 4], 0x31);
    _mm256_storeu_ps((float *)(to + c * 64), low);
    _mm256_storeu_ps((float *)(to + (c + 4) * 64), high);
  }
}
#endif

/* 64 bytes of each of 16 rows, or the `left` (a multiple of 16) that there are: vector 4 s + c of
 * `to` gets bytes [16 s + 4 c, 16 s + 4 c + 4) of all rows. */
INLINE void transpose_64_bytes(char *to, const char *const *rows, long at, long left) {
#if PIECE < LANES
  if (left >= 64) {
    UNROLL for (int q = 0; q < 4; q++) {
      transpose_32_bytes(to + q / 2 * 512 + q % 2 * 32, rows + q % 2 * 8, at + q / 2 * 32);
    }
    return;
  }
#endif
  vi quads[4][4];
  UNROLL for (int q = 0; q < 4; q++) {
    quad_steps(quads[q], rows[q] + at, rows[4 + q] + at, rows[8 + q] + at, rows[12 + q] + at, left);
  }
  UNROLL for (int s = 0; s < 4; s++, to += 4 * 64) {
    if (left <= s * 16) return;
    vi a = quads[0][s], b = quads[1][s], c = quads[2][s], d = quads[3][s];
    vi ab01 = SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    vi ab23 = SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    vi cd01 = SHUFFLE(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    vi cd23 = SHUFFLE(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
#define LOWER(u, v) SHUFFLE(u, v, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define UPPER(u, v) SHUFFLE(u, v, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
    *(vi_u *)to = LOWER(ab01, cd01);
    *(vi_u *)(to + 64) = UPPER(ab01, cd01);
    *(vi_u *)(to + 128) = LOWER(ab23, cd23);
    *(vi_u *)(to + 192) = UPPER(ab23, cd23);
#undef LOWER
#undef UPPER
  }
}

/* A panel from the 16 rows of `row_bytes` (a multiple of 16) bytes that `rows` point to. */
INLINE void make_panel(char *panel, const char *const *rows, long row_bytes) {
  for (long at = 0; at < row_bytes; at += 64) {
    transpose_64_bytes(panel + at * PANEL, rows, at, row_bytes - at);
  }
}
