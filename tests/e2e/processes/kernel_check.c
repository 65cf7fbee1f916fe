/* Each kind of kernel against sums in double precision, and rows by themselves against rows in
 * company, bit by bit; with one thread, then with three. Ends with 0 if all are right. For
 * processors that the other tests do not run on. With an argument it says what the bits were. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "amx.h"
#include "api.h"
#include "panels.h"

typedef void linear_fn(const void *, const void *, const void *, void *, int64_t, int64_t, int64_t,
                       int32_t);
linear_fn kun_linear_f32, kun_linear_bf16;
typedef void attention_fn(const kun_model *, const kun_batch *, const void *, void *, int64_t,
                          int64_t);
attention_fn kun_attention_f32, kun_attention_bf16;
void kun_packed_linear_f32(const float *, const kun_packed *, const float *, void *, int64_t,
                           int64_t, int64_t, int32_t, void *);
void kun_gather_f32(const kun_packed *, const int64_t *, float *, int64_t, int64_t);
void kun_rms_norm_f32(const float *, const float *, float *, int64_t, int64_t, float, int32_t);
void kun_argmax(const float *, int32_t *, int64_t, int64_t);
int kun_set_threads(int);

static uint32_t seed, seen; /* the last number drawn; a hash of all outputs */

static uint32_t draw(void) {
  seed = seed * 1664525u + 1013904223u;
  return seed >> 8;
}

static void see(const void *bits, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) seen = (seen ^ ((const uint8_t *)bits)[i]) * 16777619u;
}

/* Numbers in the model's dtype, and what they are. */
typedef struct {
  float *values;
  uint16_t *bf16;
} numbers;

/* Between -1 and 1, or whole numbers between -8 and 8, which any order adds up exactly. */
static numbers drawn(long count, int whole) {
  numbers some = {malloc((size_t)count * 4), malloc((size_t)count * 2)};
  for (long i = 0; i < count; i++) {
    float x = whole ? (float)(draw() % 17) - 8 : (float)(draw() % 65536) / 32768 - 1;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits &= 0xffff0000;
    memcpy(&some.values[i], &bits, 4);
    some.bf16[i] = (uint16_t)(bits >> 16);
  }
  return some;
}

static const void *as(numbers some, int is_bf16) {
  return is_bf16 ? (const void *)some.bf16 : some.values;
}

static void forget(numbers some) {
  free(some.values);
  free(some.bf16);
}

static int is_close(const char *name, long at, double found, double wanted, double within) {
  if (fabs(found - wanted) <= within) return 1;
  printf("%s: number %ld is %g, not %g\n", name, at, found, wanted);
  return 0;
}

static int check_linear(int is_bf16, long m, long n, long k, int whole) {
  const char *name = is_bf16 ? "linear of bf16" : "linear of f32";
  linear_fn *linear = is_bf16 ? kun_linear_bf16 : kun_linear_f32;
  size_t bytes = is_bf16 ? 2 : 4;
  numbers x = drawn(m * k, whole), w = drawn(n * k, whole);
  float *y = malloc((size_t)(m * n) * 4), *alone = malloc((size_t)n * 4);
  int right = 1;
  linear(as(x, is_bf16), as(w, is_bf16), NULL, y, m, n, k, KUN_FLOAT);
  see(y, (size_t)(m * n) * 4);
  for (long i = 0; i < m && right; i++) {
    const char *row = (const char *)as(x, is_bf16) + (size_t)(i * k) * bytes;
    linear(row, as(w, is_bf16), NULL, alone, 1, n, k, KUN_FLOAT);
    if (memcmp(alone, y + i * n, (size_t)n * 4) != 0) {
      printf("%s: row %ld of %ld depends on the others\n", name, i, m);
      right = 0;
    }
    for (long j = 0; j < n && right; j++) {
      double sum = 0, size = 0;
      for (long c = 0; c < k; c++) {
        double product = (double)x.values[i * k + c] * w.values[j * k + c];
        sum += product;
        size += fabs(product);
      }
      right = is_close(name, i * n + j, y[i * n + j], sum, whole ? 0 : size * 1e-5);
    }
  }
  forget(x), forget(w), free(y), free(alone);
  return right;
}

static int check_packed(int format) {
  enum { M = 7, N = 40, K = 256, PANELS = (N + 15) / 16 };
  static float x[M * K], w[N * K], y[M * N];
  static x_block rounded[M * K / BLOCK];
  static int64_t rows[N];
  size_t bytes = (size_t)(PANELS * panel_bytes(format, K / BLOCK));
  uint8_t *panels = aligned_alloc(64, (bytes + 63) / 64 * 64);
  kun_packed packed = {panels, 1, {format}, {N}};
  int right = 1;
  for (size_t i = 0; i < bytes; i++) panels[i] = (uint8_t)(0x20 + draw() % 0x1c); /* no NaN */
  for (int i = 0; i < M * K; i++) { /* what 8 bits hold exactly */
    x[i] = i % BLOCK == 0 ? 127 : (float)(draw() % 255) - 127;
  }
  for (int i = 0; i < N; i++) rows[i] = i;
  kun_gather_f32(&packed, rows, w, N, K);
  kun_packed_linear_f32(x, &packed, NULL, y, M, N, K, KUN_FLOAT, rounded);
  see(y, sizeof y);
  for (int at = 0; at < M * N && right; at++) {
    double sum = 0, size = 0;
    for (int c = 0; c < K; c++) {
      double product = (double)x[at / N * K + c] * w[at % N * K + c];
      sum += product;
      size += fabs(product);
    }
    right = is_close("packed", at, y[at], sum, size * 1e-5);
  }
  free(panels);
  if (!right) printf("of format %d\n", format);
  return right;
}

/* A prompt's second part and a decode, heads in pairs over each KV head. */
enum { HEADS = 4, KV_HEADS = 2, DIM = 64, SIZE = 16, SEQS = 2, BLOCKS = 12, TOKENS = 21 };
enum { WIDTH = (HEADS + 2 * KV_HEADS) * DIM, UNIT = 2 * KV_HEADS * SIZE * DIM };

static double attended(const float *q, const float *kv, const int32_t *table, long head, long seen_keys,
                       long dim_at) {
  double peak = -1e30, total = 0, sum = 0, scores[SIZE * BLOCKS];
  long kv_head = head / (HEADS / KV_HEADS);
  for (long pass = 0; pass < 2; pass++) {
    for (long key = 0; key < seen_keys; key++) {
      const float *unit = kv + table[key / SIZE] * (long)UNIT;
      const float *k = unit + (kv_head * SIZE + key % SIZE) * DIM;
      double score = 0;
      if (pass == 0) {
        for (int d = 0; d < DIM; d++) score += (double)q[d] * k[d];
        scores[key] = score / sqrt(DIM);
        if (scores[key] > peak) peak = scores[key];
      } else {
        double share = exp(scores[key] - peak);
        total += share;
        sum += share * k[KV_HEADS * SIZE * DIM + dim_at];
      }
    }
  }
  return sum / total;
}

static int check_attention(int is_bf16) {
  static const int32_t starts[SEQS + 1] = {0, 20, 21}, contexts[SEQS] = {90, 150}, rows[] = {0, 1};
  int32_t tables[SEQS * BLOCKS], positions[TOKENS] = {0};
  numbers kv = drawn((long)SEQS * BLOCKS * UNIT, 0), qkv = drawn((long)TOKENS * WIDTH, 0);
  void *out = calloc(TOKENS * HEADS * DIM, 4);
  int right = 1;
  for (int i = 0; i < SEQS * BLOCKS; i++) tables[i] = SEQS * BLOCKS - 1 - i;
  kun_model model = {.unit_bytes = UNIT * (is_bf16 ? 2 : 4), .heads = HEADS, .kv_heads = KV_HEADS,
                     .head_dim = DIM, .block_size = SIZE, .kv = (char *)as(kv, is_bf16)};
  kun_batch batch = {.positions = positions, .tables = tables, .rows = rows, .q_starts = starts,
                     .context_lens = contexts, .num_tokens = TOKENS, .num_seqs = SEQS,
                     .max_blocks = BLOCKS};
  (is_bf16 ? kun_attention_bf16 : kun_attention_f32)(&model, &batch, as(qkv, is_bf16), out, 0, 0);
  see(out, (size_t)TOKENS * HEADS * DIM * (is_bf16 ? 2 : 4));
  for (int at = 0; at < TOKENS * HEADS * DIM && right; at++) {
    int token = at / (HEADS * DIM), head = at / DIM % HEADS, seq = token >= starts[1];
    const float *q = qkv.values + token * WIDTH + head * DIM;
    long visible = contexts[seq] - (starts[seq + 1] - 1 - token);
    double wanted = attended(q, kv.values, tables + seq * BLOCKS, head, visible, at % DIM);
    uint32_t bits = is_bf16 ? (uint32_t)((uint16_t *)out)[at] << 16 : ((uint32_t *)out)[at];
    float found;
    memcpy(&found, &bits, 4);
    right = is_close(is_bf16 ? "attention of bf16" : "attention of f32", at, found, wanted,
                     is_bf16 ? 1e-2 : 1e-5);
  }
  forget(kv), forget(qkv), free(out);
  return right;
}

static int check_rows(void) {
  enum { N = 104 };
  numbers x = drawn(N, 0), w = drawn(N, 0);
  float y[N], logits[100] = {0};
  double squares = 0;
  int32_t best = -1;
  int right = 1;
  kun_rms_norm_f32(x.values, w.values, y, 1, N, 1e-5f, 0);
  see(y, sizeof y);
  for (int i = 0; i < N; i++) squares += (double)x.values[i] * x.values[i];
  for (int i = 0; i < N && right; i++) {
    double wanted = x.values[i] * w.values[i] / sqrt(squares / N + 1e-5);
    right = is_close("norm", i, y[i], wanted, 1e-5);
  }
  forget(x), forget(w);
  logits[73] = logits[90] = 2.0f;
  kun_argmax(logits, &best, 1, 100);
  return right && is_close("argmax", 0, best, 73, 0);
}

static int check(void) {
  static const int sizes[][3] = {{1, 70, 64}, {5, 17, 72}, {16, 33, 136}, {37, 70, 64}, {70, 40, 200}};
  seed = 1;
  for (int i = 0; i < 20; i++) {
    const int *size = sizes[i / 4];
    if (!check_linear(i % 2, size[0], size[1], size[2], i / 2 % 2)) return 0;
  }
  for (int format = KUN_Q8_0; format <= KUN_Q6_K; format++) {
    if (!check_packed(format)) return 0;
  }
  return check_attention(0) && check_attention(1) && check_rows();
}

int main(int argc, char **argv) {
  uint32_t alone;
  int refused = kun_allow_amx();
  (void)argv;
  if (refused) {
    printf("Linux refuses AMX: %s\n", strerror(refused));
    return 2;
  }
  seen = 2166136261u;
  if (!check()) return 1;
  alone = seen;
  seen = 2166136261u;
  if (!kun_set_threads(3) || !check()) return 1;
  if (seen != alone) {
    puts("three threads gave other bits");
    return 1;
  }
  puts("right");
  if (argc > 1) printf("bits %08x\n", alone);
  return 0;
}
