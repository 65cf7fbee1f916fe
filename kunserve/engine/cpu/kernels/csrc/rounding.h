/* Rows of x, rounded to 8 bits for packed weights (panels.h). Needs typed.h. */
#include "panels.h"

#define LEAST_ROUNDED 1e-30f /* smaller blocks count as zeros: 127 / x would overflow */

/* Round 32 elements to 8 bits. Where one is not finite, the scale is not. */
INLINE void round_block(x_block *block, const elem *x) {
  const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
  vf low = load(x), high = load(x + LANES);
  float most = largest_bits(larger_of((vi)low & 0x7fffffff, (vi)high & 0x7fffffff));
  memset(block, 0, sizeof *block);
  if (!(most >= LEAST_ROUNDED && most <= __FLT_MAX__)) {
    if (!(most <= __FLT_MAX__)) block->scale = block->sum = most;
    return;
  }
  vf by = splat(127.0f / most);
  vi first = (vi)dot_f32(magic, (vi)low, (vi)by) - (vi)magic;
  vi second = (vi)dot_f32(magic, (vi)high, (vi)by) - (vi)magic;
  store_bytes(block->values, first);
  store_bytes(block->values + LANES, second);
  int32_t sum_first = (int32_t)sum_lanes(to_float(first));
  int32_t sum_second = (int32_t)sum_lanes(to_float(second));
  block->scale = most / 127.0f;
  block->from_128 = -128 * (sum_first + sum_second);
  block->sum = block->scale * (float)(sum_first + sum_second);
  block->from_8 = -8 * (sum_first + sum_second);
  block->from_32[0] = -32 * sum_first;
  block->from_32[1] = -32 * sum_second;
}

/* Numbers of 16 blocks at once, lane i of block i: whole vectors are divided, not single numbers. */
#define ROUNDED LANES

/* Pairs of lanes of a and of b that are `half` apart: their first, or their second. */
INLINE vi paired(vi a, vi b, const int half, const int second) {
  switch (half) {
    case 8:
      return second ? SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
                    : SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    case 4:
      return second ? SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
                    : SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    case 2:
      return second ? SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31)
                    : SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29);
    default:
      return second ? SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
                    : SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  }
}

/* Lane i: the sum, or the largest, of the lanes of v[i]. v is lost. */
INLINE vi of_lanes(vi *v, const int is_sum) {
  UNROLL for (int half = 8; half > 0; half /= 2) UNROLL for (int i = 0; i < half; i++) {
    vi first = paired(v[2 * i], v[2 * i + 1], half, 0);
    vi second = paired(v[2 * i], v[2 * i + 1], half, 1);
    v[i] = is_sum ? first + second : larger_of(first, second);
  }
  return v[0];
}

/* As round_block does each; 0 if there is one whose numbers are too small or not finite. */
INLINE int round_16(x_block *blocks, const elem *x) {
  const vf magic = splat(12582912.0f);
  union {
    vf all;
    float of[ROUNDED];
  } by, scale, sum;
  union {
    vi all;
    int32_t of[ROUNDED];
  } half[2], from_128, from_8, from_32[2];
  vi v[ROUNDED];
  UNROLL for (int i = 0; i < ROUNDED; i++) {
    vi a = (vi)load(x + i * BLOCK), b = (vi)load(x + i * BLOCK + LANES);
    v[i] = larger_of(a & 0x7fffffff, b & 0x7fffffff);
  }
  vf most = (vf)of_lanes(v, 0);
  if (!all_hold((most >= splat(LEAST_ROUNDED)) & (most <= splat(__FLT_MAX__)))) return 0;
  by.all = splat(127.0f) / most;
  scale.all = most / splat(127.0f);
  UNROLL for (int part = 0; part < 2; part++) {
    UNROLL for (int i = 0; i < ROUNDED; i++) {
      vi number = (vi)load(x + i * BLOCK + part * LANES);
      v[i] = (vi)dot_f32(magic, number, (vi)splat(by.of[i])) - (vi)magic;
      store_bytes(blocks[i].values + part * LANES, v[i]);
    }
    half[part].all = of_lanes(v, 1);
  }
  vi both = half[0].all + half[1].all;
  sum.all = scale.all * to_float(both);
  from_128.all = both * -128;
  from_8.all = both * -8;
  from_32[0].all = half[0].all * -32;
  from_32[1].all = half[1].all * -32;
  for (int i = 0; i < ROUNDED; i++) {
    blocks[i].scale = scale.of[i];
    blocks[i].sum = sum.of[i];
    blocks[i].from_128 = from_128.of[i];
    blocks[i].from_8 = from_8.of[i];
    blocks[i].from_32[0] = from_32[0].of[i];
    blocks[i].from_32[1] = from_32[1].of[i];
  }
  return 1;
}

/* Blocks [first, end) of all rows. The last 16 may be rounded again in part. */
INLINE void round_blocks(x_block *blocks, const elem *x, long first, long end) {
  for (long i = first; i < end; i += ROUNDED) {
    if (end - first >= ROUNDED) {
      if (i > end - ROUNDED) i = end - ROUNDED;
      if (round_16(blocks + i, x + i * BLOCK)) continue;
    }
    for (long each = i; each < end && each < i + ROUNDED; each++) {
      round_block(blocks + each, x + each * BLOCK);
    }
  }
}
