/* Products with packed panels: they do not depend on the type of activations. */
#include "panels.h"

#include "api.h"

INLINE long scales_bytes(const int format, long blocks) {
  long bytes = 0;
  switch (format) {
    case KUN_Q8_0:
    case KUN_Q4_0: bytes = blocks * 32; break;
    case KUN_Q4_1: bytes = blocks * 64; break;
    case KUN_INT8: bytes = 64; break;
    case KUN_Q4_K: bytes = blocks / 8 * 64 + blocks * 32; break;
    case KUN_Q6_K: bytes = blocks / 8 * 32 + blocks * 32; break;
  }
  return (bytes + 63) / 64 * 64;
}

INLINE long block_bytes(const int format) {
  switch (format) {
    case KUN_Q8_0:
    case KUN_INT8: return 512;
    case KUN_Q6_K: return 384;
    default: return 256;
  }
}

long panel_bytes(int format, long blocks) {
  return scales_bytes(format, blocks) + blocks * block_bytes(format);
}

INLINE vf halves_at(const char *p) { return widen_f16(*(const half_u *)p); }

/* What a block's sums are multiplied with, and what is added per unit of x's sum. */
typedef struct {
  vf scale, low;
  vi halves[2]; /* Q6_K: of each half of the block */
} block_scales;

INLINE block_scales scales_of(const int format, const char *scales, long block, long blocks) {
  block_scales found = {};
  const char *big = scales + block / 8 * (format == KUN_Q4_K ? 64 : 32);
  const char *small = scales + blocks / 8 * (format == KUN_Q4_K ? 64 : 32) + block * 32;
  switch (format) {
    case KUN_Q8_0:
    case KUN_Q4_0: found.scale = halves_at(scales + block * 32); break;
    case KUN_Q4_1:
      found.scale = halves_at(scales + block * 64);
      found.low = halves_at(scales + block * 64 + 32);
      break;
    case KUN_INT8: found.scale = splat(1.0f); break;
    case KUN_Q4_K:
      found.scale = halves_at(big) * to_float(widen_bytes((const uint8_t *)small));
      found.low = -(halves_at(big + 32) * to_float(widen_bytes((const uint8_t *)small + 16)));
      break;
    case KUN_Q6_K:
      found.scale = halves_at(big);
      found.halves[0] = widen_signed((const int8_t *)small);
      found.halves[1] = widen_signed((const int8_t *)small + 16);
      break;
  }
  return found;
}

/* The 8 vectors of a block, a byte per value. */
INLINE void load_values(const int format, vi *w, const char *values) {
  if (format == KUN_Q8_0 || format == KUN_INT8) {
    UNROLL for (int s = 0; s < 8; s++) w[s] = *(const vi_u *)(values + s * 64);
    return;
  }
  UNROLL for (int s = 0; s < 4; s++) {
    vi both = *(const vi_u *)(values + s * 64);
    w[s] = both & 0x0f0f0f0f;
    w[s + 4] = (both >> 4) & 0x0f0f0f0f;
  }
  if (format != KUN_Q6_K) return;
  UNROLL for (int s = 0; s < 8; s++) {
    vi high = *(const vi_u *)(values + 256 + s / 4 * 64);
    int down = 2 * (s % 4) - 4;
    w[s] |= (down < 0 ? high << -down : high >> down) & 0x30303030;
  }
}

#define TURNS 2 /* rows of x that take turns */

/* What a row's sum begins with, because 128 (or 8, or 32) stands for 0. */
INLINE vi start_of(const int format, const x_block *x) {
  if (format == KUN_Q8_0 || format == KUN_INT8) return spread_4_bytes(&x->from_128);
  if (format == KUN_Q4_0) return spread_4_bytes(&x->from_128) >> 4;
  if (format == KUN_Q6_K) return spread_4_bytes(&x->from_32[0]);
  return (vi){};
}

/* A block's sum of integers, added to the blocks before. */
INLINE vf add_scaled(const int format, vf sum, vi total, const block_scales *by,
                     const x_block *x) {
  vf scale = format == KUN_INT8 ? splat(x->scale) : by->scale * splat(x->scale);
  sum = dot_f32(sum, (vi)to_float(total), (vi)scale);
  if (format == KUN_Q4_1 || format == KUN_Q4_K) {
    sum = dot_f32(sum, (vi)by->low, (vi)splat(x->sum));
  }
  return sum;
}

/* A block of `rows` rows of x times the panel's. Each row has two sums of integers (in Q6_K with a
 * scale each), and rows take turns: so products do not wait for each other. */
INLINE void add_blocks(const int format, const int rows, vf *sum, const vi *w,
                       const block_scales *by, const x_block *x, long stride) {
  vi first[TURNS], second[TURNS];
  UNROLL for (int i = 0; i < rows; i++) {
    first[i] = start_of(format, x + i * stride);
    second[i] = format == KUN_Q6_K ? spread_4_bytes(&x[i * stride].from_32[1]) : (vi){};
  }
  UNROLL for (int s = 0; s < 4; s++) UNROLL for (int i = 0; i < rows; i++) {
    const int8_t *values = x[i * stride].values + 4 * s;
    first[i] = dot_bytes(first[i], w[s], spread_4_bytes(values));
    second[i] = dot_bytes(second[i], w[s + 4], spread_4_bytes(values + 16));
  }
  UNROLL for (int i = 0; i < rows; i++) {
    vi total = format == KUN_Q6_K ? first[i] * by->halves[0] + second[i] * by->halves[1]
                                  : first[i] + second[i];
    sum[i] = add_scaled(format, sum[i], total, by, x + i * stride);
  }
}

/* Memory is read in one run, panel after panel. The processor's own prefetching stops at the end of
 * each page, of which a panel has a few. */
#define FETCHED_AHEAD 16384

INLINE void tile_of(const int format, const int rows, vf *out, const char *panel, const x_block *x,
                    long stride, long blocks, int fetches) {
  vf sum[PACKED_ROWS];
  const char *values = panel + scales_bytes(format, blocks);
  UNROLL for (int i = 0; i < rows; i++) sum[i] = (vf){};
  for (long b = 0; b < blocks; b++, values += block_bytes(format)) {
    vi w[8];
    block_scales by = scales_of(format, panel, b, blocks);
    if (fetches) {
      UNROLL for (int line = 0; line < block_bytes(format); line += 64) {
        __builtin_prefetch(values + FETCHED_AHEAD + line, 0, 2);
      }
    }
    load_values(format, w, values);
    UNROLL for (int i = 0; i < rows; i += TURNS) {
      add_blocks(format, rows - i < TURNS ? rows - i : TURNS, sum + i, w, &by, x + i * stride + b,
                 stride);
    }
  }
  UNROLL for (int i = 0; i < rows; i++) {
    out[i] = format == KUN_INT8 ? sum[i] * load_f32((const float *)panel) : sum[i];
  }
}

#define TILE(format, rows)                                     \
  case rows:                                                   \
    tile_of(format, rows, out, panel, x, stride, blocks, fetches); \
    break;
#ifdef __AVX512F__
#define TILES_OF_MORE(format) \
  TILE(format, 5) TILE(format, 6) TILE(format, 7) TILE(format, 8) TILE(format, 10) TILE(format, 12)
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

static int zero_of(int format) {
  switch (format) {
    case KUN_Q8_0:
    case KUN_INT8: return 128;
    case KUN_Q4_0: return 8;
    case KUN_Q6_K: return 32;
    default: return 0;
  }
}

void unpack_block(int format, float *out, const char *panel, int row, long block, long blocks) {
  vi w[8];
  block_scales by = scales_of(format, panel, block, blocks);
  load_values(format, w, panel + scales_bytes(format, blocks) + block * block_bytes(format));
  for (int column = 0; column < BLOCK; column++) {
    int step = column / 4, value = (uint8_t)((uint32_t)w[step][row] >> column % 4 * 8);
    float scale = by.scale[row];
    if (format == KUN_INT8) scale = ((const float *)panel)[row];
    if (format == KUN_Q6_K) scale *= (float)by.halves[column / 16][row];
    out[column] = scale * (float)(value - zero_of(format)) + by.low[row];
  }
}
