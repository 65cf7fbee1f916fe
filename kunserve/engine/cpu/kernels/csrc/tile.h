/* Attention's multiply-accumulate kernel: rows of x against a packed panel of 16 rows of w. Needs
 * typed.h and transpose.h. With AVX2 it is that of panel_tile.h.
 *
 * A packed panel is [step][quad q][row r][16 bytes]: step s holds bytes [16 s, 16 s + 16) of the
 * panel's rows {q, 4 + q, 8 + q, 12 + q}. An accumulator has one lane per (row, 4-byte slot of the
 * step), each summed over the steps in order; then the four slots are added in a fixed order. So
 * an output is the same bits however many rows share a call. Packing is scratch, redone each call.
 */
#define STEP_BYTES (PANEL * 16)

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

#if PIECE == LANES
/* Pack the 16 rows of `row_bytes` (a multiple of 16) bytes that `rows` point to, while fetching the
 * next ones into the L2 cache, spread evenly so that memory never rests. Not into L1, where they
 * would push out the packed panel. */
INLINE void pack_panel(char *packed, const char *const *rows, long row_bytes,
                       const char *const *next) {
  for (long at = 0; at < row_bytes; at += 64) {
    long left = row_bytes - at;
    UNROLL for (int r = 0; r < PANEL; r++) __builtin_prefetch(next[r] + at, 0, 2);
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

#endif

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

/* `add_slots` with cheaper shuffles: the same sums. */
INLINE pf add_slots_of(const pf *acc) {
#if PIECE < LANES
#define OF(a, b, which) (pf)_mm256_shuffle_ps((__m256)(a), (__m256)(b), which)
#elif defined(__AVX512F__)
#define OF(a, b, which) (vf)_mm512_shuffle_ps((__m512)(a), (__m512)(b), which)
#endif
#ifdef OF
  pf ab = OF(acc[0], acc[1], 0x44) + OF(acc[0], acc[1], 0xee);
  pf cd = OF(acc[2], acc[3], 0x44) + OF(acc[2], acc[3], 0xee);
  return OF(ab, cd, 0x88) + OF(ab, cd, 0xdd);
#undef OF
#else
  return add_slots(acc);
#endif
}

#if PIECE == LANES && !defined(AMX_PRODUCTS)
INLINE void tile_of(const int rows, vf *out, const char *packed, const char *x, long x_stride,
                    long steps) {
  UNROLL for (int piece = 0; piece < PIECES; piece++) {
    pf acc[TILE_ROWS][4];
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int q = 0; q < 4; q++) acc[i][q] = (pf){};
    for (long s = 0; s < steps; s++) {
      const char *at = packed + s * STEP_BYTES + piece * PIECE * 4;
      pi w[4];
      UNROLL for (int q = 0; q < 4; q++) w[q] = *(const pi_u *)(at + q * 64);
      UNROLL for (int i = 0; i < rows; i++) {
        pi row = piece_spread_16(x + i * x_stride + s * 16);
        UNROLL for (int q = 0; q < 4; q++) acc[i][q] = NAME(piece_dot)(acc[i][q], w[q], row);
      }
    }
    UNROLL for (int i = 0; i < rows; i++) *piece_of(out + i, piece) = add_slots_of(acc[i]);
  }
}

/* out[i] = the 16 dot products of x's row i with the panel, for i < rows <= TILE_ROWS. */
static void tile(int rows, vf *out, const char *packed, const char *x, long x_stride, long steps) {
#define CALL(n) tile_of(n, out, packed, x, x_stride, steps)
  WITH_CONSTANT_ROWS(rows, CALL)
#undef CALL
}
#endif
