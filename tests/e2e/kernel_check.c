/* Products of small numbers, which every rounding gives exactly, and a maximum; then the same with
 * three threads. Ends with 0 if they are right. For processors that the tests do not run on. */
#include <stdio.h>
#include <string.h>

#include "api.h"

void kun_linear_f32(const float *, const float *, const float *, void *, int64_t, int64_t, int64_t,
                    int32_t);
void kun_linear_bf16(const uint16_t *, const uint16_t *, const uint16_t *, void *, int64_t, int64_t,
                     int64_t, int32_t);
void kun_argmax(const float *, int32_t *, int64_t, int64_t);
int kun_set_threads(int);

enum { M = 37, N = 70, K = 64 };

static uint16_t bf16_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (uint16_t)(bits >> 16);
}

static int is_right(const char *name, const float *y, const float *x, const float *w) {
  for (int i = 0; i < M; i++) {
    for (int j = 0; j < N; j++) {
      float sum = 0;
      for (int k = 0; k < K; k++) sum += x[i * K + k] * w[j * K + k];
      if (y[i * N + j] != sum) {
        printf("%s[%d][%d] is %g, not %g\n", name, i, j, y[i * N + j], sum);
        return 0;
      }
    }
  }
  return 1;
}

static int check(void) {
  static float x[M * K], w[N * K], y[M * N];
  static uint16_t x16[M * K], w16[N * K];
  for (int i = 0; i < M * K; i++) x16[i] = bf16_of(x[i] = (float)((i * 7) % 11 - 5));
  for (int i = 0; i < N * K; i++) w16[i] = bf16_of(w[i] = (float)((i * 5) % 13 - 6));
  kun_linear_f32(x, w, NULL, y, M, N, K, KUN_FLOAT);
  if (!is_right("f32", y, x, w)) return 0;
  memset(y, 0, sizeof y);
  kun_linear_bf16(x16, w16, NULL, y, M, N, K, KUN_FLOAT);
  if (!is_right("bf16", y, x, w)) return 0;
  float logits[100] = {0};
  int32_t best = -1;
  logits[73] = 2.0f;
  kun_argmax(logits, &best, 1, 100);
  return best == 73;
}

int main(void) {
  if (!check() || !kun_set_threads(3) || !check()) return 1;
  puts("right");
  return 0;
}
