/* Products with packed panels: they do not depend on the type of activations. */
#include "panels.h"

#include "api.h"
#include "pieces.h"

#define LINE 64       /* bytes of a cache line */
#define SPLIT_BELOW 6 /* rows that have two sums each */

INLINE long block_bytes(const int format) {
  switch (format) {
    case KUN_Q8_0:
    case KUN_INT8: return 512;
    case KUN_Q6_K: return 384;
    default: return 256;
  }
}

/* Blocks that share a line of scales, and those that share a line of larger ones; 0: there is none.
 * All blocks of a row share INT8's. */
INLINE long line_blocks(const int format) {
  return format == KUN_INT8 ? 0 : format == KUN_Q4_1 ? 1 : 2;
}
INLINE long big_blocks(const int format, long blocks) {
  return format == KUN_INT8 ? blocks : format == KUN_Q4_K ? 8 : format == KUN_Q6_K ? 16 : 0;
}

INLINE long lines(long blocks, long each) { return each > 0 ? (blocks + each - 1) / each : 0; }

INLINE long bytes_of(const int format, long blocks) {
  return LINE * (lines(blocks, line_blocks(format)) + lines(blocks, big_blocks(format, blocks))) +
         blocks * block_bytes(format);
}

long panel_bytes(int format, long blocks) { return bytes_of(format, blocks); }

/* Where a block lies, in bytes from the panel's begin. */
typedef struct {
  long big, line, values;
} block_place;

/* From block to block. */
INLINE void go_to(const int format, block_place *place, long block, long blocks) {
  const long per_line = line_blocks(format), per_big = big_blocks(format, blocks);
  if (block > 0) place->values += block_bytes(format);
  if (per_big > 0 && block % per_big == 0) {
    place->big = place->values;
    place->values += LINE;
  }
  if (per_line > 0 && block % per_line == 0) {
    place->line = place->values;
    place->values += LINE;
  }
}

/* What a block's sums are multiplied with, and what is added per unit of x's sum. */
typedef struct {
  pf scale, low;
  pi halves[2]; /* Q6_K: of each half of the block */
} block_scales;

INLINE block_scales scales_of(const int format, const char *panel, block_place place, long block,
                              const int piece) {
  block_scales found = {};
  const char *line = panel + place.line + (format == KUN_Q4_1 ? 0 : block % 2 * 32);
  const char *big = panel + place.big + (format == KUN_Q6_K ? block / 8 % 2 * 32 : 0);
  const char *half = line + piece * PIECE * 2, *byte = line + piece * PIECE;
  big += piece * PIECE * 2;
  switch (format) {
    case KUN_Q8_0:
    case KUN_Q4_0: found.scale = piece_f16(half); break;
    case KUN_Q4_1:
      found.scale = piece_f16(half);
      found.low = piece_f16(half + 32);
      break;
    case KUN_INT8: found.scale = piece_splat(1.0f); break;
    case KUN_Q4_K:
      found.scale = piece_f16(big) * piece_to_float(piece_bytes((const uint8_t *)byte));
      found.low = -(piece_f16(big + 32) * piece_to_float(piece_bytes((const uint8_t *)byte + 16)));
      break;
    case KUN_Q6_K:
      found.scale = piece_f16(big);
      found.halves[0] = piece_signed((const int8_t *)byte);
      found.halves[1] = piece_signed((const int8_t *)byte + 16);
      break;
  }
  return found;
}

/* Step s (of 8) of a block, a byte per value. */
INLINE pi step_of(const int format, const char *values, const int s) {
  if (format == KUN_Q8_0 || format == KUN_INT8) return *(const pi_u *)(values + s * 64);
  pi both = *(const pi_u *)(values + s % 4 * 64);
  pi low = (s < 4 ? both : both >> 4) & 0x0f0f0f0f;
  if (format != KUN_Q6_K) return low;
  pi high = *(const pi_u *)(values + 256 + s / 4 * 64);
  const int down = 2 * (s % 4) - 4;
  return low | ((down < 0 ? high << -down : high >> down) & 0x30303030);
}

/* What a row's sum begins with, because 128 (or 8, or 32) stands for 0. */
INLINE pi start_of(const int format, const x_block *x) {
  if (format == KUN_Q8_0 || format == KUN_INT8) return piece_spread(&x->from_128);
  if (format == KUN_Q4_0) return piece_spread(&x->from_8);
  if (format == KUN_Q6_K) return piece_spread(&x->from_32[0]);
  return (pi){};
}

/* A block's sum of integers, added to the blocks before. */
INLINE pf add_scaled(const int format, pf sum, pi total, const block_scales *by,
                     const x_block *x) {
  pf scale = format == KUN_INT8 ? piece_splat(x->scale) : by->scale * piece_splat(x->scale);
  sum = piece_dot_f32(sum, (pi)piece_to_float(total), (pi)scale);
  if (format == KUN_Q4_1 || format == KUN_Q4_K) {
    sum = piece_dot_f32(sum, (pi)by->low, (pi)piece_splat(x->sum));
  }
  return sum;
}

/* A block of `rows` rows of x times the panel's. Few rows have two sums of integers each (in Q6_K
 * all have, with a scale each), so that products do not wait for each other. */
INLINE void add_blocks(const int format, const int rows, pf *sum, const char *values,
                       const block_scales *by, const x_block *x, long stride) {
  const int split = format == KUN_Q6_K || rows < SPLIT_BELOW;
  pi first[PACKED_ROWS], second[PACKED_ROWS];
  UNROLL for (int i = 0; i < rows; i++) {
    first[i] = start_of(format, x + i * stride);
    second[i] = format == KUN_Q6_K ? piece_spread(&x[i * stride].from_32[1]) : (pi){};
  }
  UNROLL for (int turn = 0; turn < 8; turn++) {
    const int s = turn / 2 + turn % 2 * 4;
    pi w = step_of(format, values, s);
    UNROLL for (int i = 0; i < rows; i++) {
      pi *sums = split && s >= 4 ? second : first;
      sums[i] = piece_dot_bytes(sums[i], w, piece_spread(x[i * stride].values + 4 * s));
    }
  }
  UNROLL for (int i = 0; i < rows; i++) {
    pi total = first[i];
    if (format == KUN_Q6_K) total = total * by->halves[0] + second[i] * by->halves[1];
    else if (split) total += second[i];
    sum[i] = add_scaled(format, sum[i], total, by, x + i * stride);
  }
}

/* How far before memory is fetched. The processor follows one run of memory by itself, and a row or
 * two need it soon. More rows take longer than it looks ahead: they fetch the next panel. */
#define NEAR 1024
#define FAR 65536

INLINE void fetch_block(const int format, const char *values, long ahead) {
  UNROLL for (int line = 0; line <= block_bytes(format); line += LINE) {
    __builtin_prefetch(values + ahead + line, 0, 2);
  }
}

INLINE void tile_piece(const int format, const int rows, vf *out, const char *panel,
                       const x_block *x, long stride, long blocks, int fetches, const int piece) {
  pf sum[PACKED_ROWS];
  block_place place = {};
  const long bytes = bytes_of(format, blocks), ahead = rows <= 2 ? NEAR : bytes < FAR ? bytes : FAR;
  UNROLL for (int i = 0; i < rows; i++) sum[i] = (pf){};
  for (long b = 0; b < blocks; b++) {
    go_to(format, &place, b, blocks);
    block_scales by = scales_of(format, panel, place, b, piece);
    const char *values = panel + place.values;
    if (fetches) fetch_block(format, values, ahead);
    add_blocks(format, rows, sum, values + piece * PIECE * 4, &by, x + b, stride);
  }
  UNROLL for (int i = 0; i < rows; i++) {
    const pf_u *scales = (const pf_u *)panel + piece;
    *piece_of(out + i, piece) = format == KUN_INT8 ? sum[i] * *scales : sum[i];
  }
}

INLINE void tile_of(const int format, const int rows, vf *out, const char *panel, const x_block *x,
                    long stride, long blocks, int fetches) {
  UNROLL for (int piece = 0; piece < PIECES; piece++) {
    tile_piece(format, rows, out, panel, x, stride, blocks, fetches && piece == 0, piece);
  }
}

#define TILE(format, rows)                                         \
  case rows:                                                       \
    tile_of(format, rows, out, panel, x, stride, blocks, fetches); \
    break;
#ifdef __AVX512F__
#define TILES_OF_MORE(format) \
  TILE(format, 5) TILE(format, 6) TILE(format, 7) TILE(format, 8) TILE(format, 9)
#else
#define TILES_OF_MORE(format)
#endif
#define TILES(format)                                                              \
  static void tile_##format(int rows, vf *out, const char *panel, const x_block *x, \
                            long stride, long blocks, int fetches) {               \
    switch (rows) {                                                                \
      TILE(format, 1) TILE(format, 2) TILE(format, 3) TILE(format, 4)              \
      TILES_OF_MORE(format)                                                        \
    }                                                                              \
  }
TILES(KUN_Q8_0)
TILES(KUN_Q4_0)
TILES(KUN_Q4_1)
TILES(KUN_INT8)
TILES(KUN_Q4_K)
TILES(KUN_Q6_K)

void packed_tile(int format, int rows, vf *out, const char *panel, const x_block *x, long stride,
                 long blocks, int fetches) {
  switch (format) {
    case KUN_Q8_0: tile_KUN_Q8_0(rows, out, panel, x, stride, blocks, fetches); break;
    case KUN_Q4_0: tile_KUN_Q4_0(rows, out, panel, x, stride, blocks, fetches); break;
    case KUN_Q4_1: tile_KUN_Q4_1(rows, out, panel, x, stride, blocks, fetches); break;
    case KUN_INT8: tile_KUN_INT8(rows, out, panel, x, stride, blocks, fetches); break;
    case KUN_Q4_K: tile_KUN_Q4_K(rows, out, panel, x, stride, blocks, fetches); break;
    case KUN_Q6_K: tile_KUN_Q6_K(rows, out, panel, x, stride, blocks, fetches); break;
  }
}

#ifdef KUN_AMX
/* Integers have the same sum in any order, so rows may go either way. */

/* Steps [first, first + steps) of a block as a tile B, and zeros in the place of the others. */
INLINE void amx_steps(const int format, char *to, const char *values, const int first,
                      const int steps) {
  memset(to, 0, AMX_BYTE_STEPS * LINE);
  UNROLL for (int s = first; s < first + steps; s++) UNROLL for (int p = 0; p < PIECES; p++) {
    *((pi_u *)(to + s * LINE) + p) = step_of(format, values + p * PIECE * 4, s);
  }
}

/* sums[i] = the 16 sums of row i of x with the tile B at `w`. */
INLINE void amx_sums(vi *sums, const char *w, const x_block *x, long stride) {
  _tile_zero(0);
  AMX_LOAD(AMX_PANEL_TILE, w, LINE);
  AMX_LOAD(5, x->values, stride * (long)sizeof(x_block));
  _tile_dpbsud(0, 5, AMX_PANEL_TILE);
  _tile_stored(0, sums, AMX_ROW_BYTES);
}

/* As `add_blocks`, of one piece, with the sums of both halves of Q6_K's blocks, else of the whole. */
INLINE void amx_add(const int format, vf *sum, const vi *first, const vi *second,
                    const block_scales *by, const x_block *x, long stride, const int piece) {
  UNROLL for (int i = 0; i < AMX_HEIGHT; i++) {
    const x_block *row = x + i * stride;
    pi total = *((const pi_u *)(first + i) + piece) + start_of(format, row);
    pf_u *to = piece_of(sum + i, piece);
    if (format == KUN_Q6_K) {
      pi other = *((const pi_u *)(second + i) + piece) + piece_spread(&row->from_32[1]);
      total = total * by->halves[0] + other * by->halves[1];
    }
    *to = add_scaled(format, *to, total, by, row);
  }
}

INLINE void amx_tile_of(const int format, vf *out, const char *panel, const x_block *x, long stride,
                        long blocks, int fetches) {
  const int is_plain = format == KUN_Q8_0 || format == KUN_INT8;
  const int steps = format == KUN_Q6_K ? AMX_BYTE_STEPS / 2 : AMX_BYTE_STEPS;
  const long bytes = bytes_of(format, blocks), ahead = bytes < FAR ? bytes : FAR;
  vi first[AMX_HEIGHT], second[AMX_HEIGHT];
  vf sum[AMX_HEIGHT]; /* in registers */
  char unpacked[AMX_BYTE_STEPS * LINE];
  block_place place = {};
  amx_shape_of_bytes();
  UNROLL for (int i = 0; i < AMX_HEIGHT; i++) sum[i] = (vf){};
  for (long b = 0; b < blocks; b++) {
    go_to(format, &place, b, blocks);
    const char *values = panel + place.values;
    if (fetches) fetch_block(format, values, ahead);
    if (!is_plain) amx_steps(format, unpacked, values, 0, steps);
    amx_sums(first, is_plain ? values : unpacked, x + b, stride);
    if (format == KUN_Q6_K) {
      amx_steps(format, unpacked, values, steps, steps);
      amx_sums(second, unpacked, x + b, stride);
    }
    UNROLL for (int piece = 0; piece < PIECES; piece++) {
      block_scales by = scales_of(format, panel, place, b, piece);
      amx_add(format, sum, first, second, &by, x + b, stride, piece);
    }
  }
  UNROLL for (int i = 0; i < AMX_HEIGHT; i++) {
    out[i] = format == KUN_INT8 ? sum[i] * load_f32((const float *)panel) : sum[i];
  }
}

#define AMX_TILE(format)                                                    \
  static void amx_tile_##format(vf *out, const char *panel, const x_block *x, \
                                long stride, long blocks, int fetches) {    \
    amx_tile_of(format, out, panel, x, stride, blocks, fetches);            \
  }
AMX_TILE(KUN_Q8_0)
AMX_TILE(KUN_Q4_0)
AMX_TILE(KUN_Q4_1)
AMX_TILE(KUN_INT8)
AMX_TILE(KUN_Q4_K)
AMX_TILE(KUN_Q6_K)

void packed_tile_by_amx(int format, vf *out, const char *panel, const x_block *x, long stride,
                        long blocks, int fetches) {
  switch (format) {
    case KUN_Q8_0: amx_tile_KUN_Q8_0(out, panel, x, stride, blocks, fetches); break;
    case KUN_Q4_0: amx_tile_KUN_Q4_0(out, panel, x, stride, blocks, fetches); break;
    case KUN_Q4_1: amx_tile_KUN_Q4_1(out, panel, x, stride, blocks, fetches); break;
    case KUN_INT8: amx_tile_KUN_INT8(out, panel, x, stride, blocks, fetches); break;
    case KUN_Q4_K: amx_tile_KUN_Q4_K(out, panel, x, stride, blocks, fetches); break;
    case KUN_Q6_K: amx_tile_KUN_Q6_K(out, panel, x, stride, blocks, fetches); break;
  }
}
#endif

static int zero_of(int format) {
  switch (format) {
    case KUN_Q8_0:
    case KUN_INT8: return 128;
    case KUN_Q4_0: return 8;
    case KUN_Q6_K: return 32;
    default: return 0;
  }
}

/* 32 columns of one row. */
INLINE void unpack_block(const int format, float *out, const char *panel, int row,
                         block_place place, long block) {
  pi w[8];
  const int piece = row / PIECE, lane = row % PIECE;
  block_scales by = scales_of(format, panel, place, block, piece);
  const char *values = panel + place.values + piece * PIECE * 4;
  UNROLL for (int s = 0; s < 8; s++) w[s] = step_of(format, values, s);
  for (int column = 0; column < BLOCK; column++) {
    int step = column / 4, value = (uint8_t)((uint32_t)w[step][lane] >> column % 4 * 8);
    float scale = by.scale[lane];
    if (format == KUN_INT8) scale = ((const float *)panel)[row];
    if (format == KUN_Q6_K) scale *= (float)by.halves[column / 16][lane];
    out[column] = scale * (float)(value - zero_of(format)) + by.low[lane];
  }
}

INLINE void unpack_row_of(const int format, float *out, const char *panel, int row, long blocks) {
  block_place place = {};
  for (long b = 0; b < blocks; b++) {
    go_to(format, &place, b, blocks);
    unpack_block(format, out + b * BLOCK, panel, row, place, b);
  }
}

void unpack_row(int format, float *out, const char *panel, int row, long blocks) {
  switch (format) {
    case KUN_Q8_0: unpack_row_of(KUN_Q8_0, out, panel, row, blocks); break;
    case KUN_Q4_0: unpack_row_of(KUN_Q4_0, out, panel, row, blocks); break;
    case KUN_Q4_1: unpack_row_of(KUN_Q4_1, out, panel, row, blocks); break;
    case KUN_INT8: unpack_row_of(KUN_INT8, out, panel, row, blocks); break;
    case KUN_Q4_K: unpack_row_of(KUN_Q4_K, out, panel, row, blocks); break;
    case KUN_Q6_K: unpack_row_of(KUN_Q6_K, out, panel, row, blocks); break;
  }
}
