/* AMX's instructions in C, as Intel's manual describes them, for processors that have none: compile
 * with -DKUN_AMX and -DKUN_AMX_INSTRUCTIONS=<instructions.h>. What a processor refuses ends the
 * program. */
#ifndef AMX_INSTRUCTIONS_H
#define AMX_INSTRUCTIONS_H

#include <float.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#endif

#define _tile_loadconfig tile_in_c_shape
#define _tile_release tile_in_c_release
#define _tile_loadd tile_in_c_load
#define _tile_stored tile_in_c_store
#define _tile_zero tile_in_c_zero
#define _tile_dpbf16ps tile_in_c_products
#define _tile_dpbsud tile_in_c_bytes

typedef struct {
  int rows, row_bytes; /* 0: none of its rows may be used */
  uint8_t at[16][64];
} tile_in_c;

/* One set for each thread, whichever file uses it. */
__attribute__((weak)) _Thread_local tile_in_c tiles_in_c[8];

/* Products so far, of all threads: a test asks whether there were any. */
__attribute__((weak)) uint64_t tile_products_in_c;

static inline void tile_in_c_need(int holds) {
  if (!holds) abort();
}

static inline void tile_in_c_release(void) { memset(tiles_in_c, 0, sizeof tiles_in_c); }

static inline void tile_in_c_shape(const void *shapes) {
  const uint8_t *bytes = shapes;
  tile_in_c_release();
  tile_in_c_need(bytes[0] == 1);
  for (int i = 1; i < 16; i++) tile_in_c_need(bytes[i] == 0);
  for (int t = 0; t < 16; t++) {
    uint16_t row_bytes;
    memcpy(&row_bytes, bytes + 16 + 2 * t, 2);
    int rows = bytes[48 + t];
    tile_in_c_need(t < 8 || (row_bytes == 0 && rows == 0));
    tile_in_c_need(row_bytes <= 64 && rows <= 16 && (row_bytes == 0) == (rows == 0));
    if (t < 8) tiles_in_c[t] = (tile_in_c){.rows = rows, .row_bytes = row_bytes};
  }
}

static inline void tile_in_c_load(int tile, const void *from, long stride) {
  tile_in_c *t = &tiles_in_c[tile];
  tile_in_c_need(t->rows > 0 && t->row_bytes % 4 == 0);
  memset(t->at, 0, sizeof t->at);
  for (int row = 0; row < t->rows; row++) {
    memcpy(t->at[row], (const char *)from + row * stride, (size_t)t->row_bytes);
  }
}

static inline void tile_in_c_store(int tile, void *to, long stride) {
  const tile_in_c *t = &tiles_in_c[tile];
  tile_in_c_need(t->rows > 0 && t->row_bytes % 4 == 0);
  for (int row = 0; row < t->rows; row++) {
    memcpy((char *)to + row * stride, t->at[row], (size_t)t->row_bytes);
  }
}

static inline void tile_in_c_zero(int tile) {
  tile_in_c_need(tiles_in_c[tile].rows > 0);
  memset(tiles_in_c[tile].at, 0, sizeof tiles_in_c[tile].at);
}

/* What is smaller than a normal number counts as 0, read or computed. */
static inline float tile_in_c_flushed(float x) {
  return x > -FLT_MIN && x < FLT_MIN ? __builtin_copysignf(0.0f, x) : x;
}

/* The even columns (odd = 0) or the odd ones of 16 pairs of bfloat16. */
static inline void tile_in_c_wide(float *to, const uint8_t *pairs, int odd) {
  for (int n = 0; n < 16; n++) {
    uint32_t pair;
    float x;
    memcpy(&pair, pairs + 4 * n, 4);
    pair = odd ? pair & 0xffff0000u : pair << 16;
    memcpy(&x, &pair, 4);
    to[n] = tile_in_c_flushed(x);
  }
}

/* Shapes of which products can be made. */
static inline void tile_in_c_need_product(int to, int left, int right) {
  const tile_in_c *a = &tiles_in_c[left], *b = &tiles_in_c[right], *c = &tiles_in_c[to];
  tile_in_c_need(to != left && left != right && right != to);
  tile_in_c_need(a->rows > 0 && b->rows > 0 && c->rows > 0);
  tile_in_c_need(c->rows == a->rows && c->row_bytes == b->row_bytes);
  tile_in_c_need(a->row_bytes == 4 * b->rows && c->row_bytes % 4 == 0);
  __atomic_fetch_add(&tile_products_in_c, 1, __ATOMIC_RELAXED);
}

/* Signed bytes of `left` times unsigned ones of `right`, added to 32 bits. */
static inline void tile_in_c_bytes(int to, int left, int right) {
  tile_in_c *c = &tiles_in_c[to];
  const tile_in_c *a = &tiles_in_c[left], *b = &tiles_in_c[right];
  tile_in_c_need_product(to, left, right);
  for (int m = 0; m < c->rows; m++) {
    uint32_t total[16];
    memcpy(total, c->at[m], sizeof total);
    for (int k = 0; k < b->rows; k++) {
      for (int n = 0; n < 64; n++) {
        total[n / 4] += (uint32_t)((int8_t)a->at[m][4 * k + n % 4] * b->at[k][n]);
      }
    }
    memcpy(c->at[m], total, (size_t)c->row_bytes);
  }
}

static inline void tile_in_c_products(int to, int left, int right) {
  tile_in_c *c = &tiles_in_c[to];
  const tile_in_c *a = &tiles_in_c[left], *b = &tiles_in_c[right];
  float wide[16][2][16];
  tile_in_c_need_product(to, left, right);
  for (int k = 0; k < b->rows; k++) {
    for (int odd = 0; odd < 2; odd++) tile_in_c_wide(wide[k][odd], b->at[k], odd);
  }
  for (int m = 0; m < c->rows; m++) {
    float sums[2][16] = {{0}}, row[2][16], total[16];
    for (int odd = 0; odd < 2; odd++) {
      tile_in_c_wide(row[odd], a->at[m], odd);
      for (int k = 0; k < b->rows; k++) {
        for (int n = 0; n < 16; n++) {
          sums[odd][n] =
              tile_in_c_flushed(__builtin_fmaf(row[odd][k], wide[k][odd][n], sums[odd][n]));
        }
      }
    }
    memcpy(total, c->at[m], sizeof total);
    for (int n = 0; n < 16; n++) {
      float both = tile_in_c_flushed(sums[0][n] + sums[1][n]);
      total[n] = tile_in_c_flushed(tile_in_c_flushed(total[n]) + both);
    }
    memcpy(c->at[m], total, (size_t)c->row_bytes);
  }
}

#endif
