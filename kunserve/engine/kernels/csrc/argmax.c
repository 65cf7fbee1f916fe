/* The largest of each row of logits. */
#include <stdint.h>

#include "pool.h"
#include "vec.h"

typedef struct {
  const float *logits;
  int32_t *out;
  long rows, n;
} argmax_job;

#define STRIDE (4 * LANES)

/* The lowest index that holds the row's maximum. A NaN is larger than all others, as numpy has it. */
static int32_t argmax_row(const float *row, long n) {
  vf top[4], best_of;
  vi unordered = {};
  long i = 0, whole = n / STRIDE * STRIDE;
  UNROLL for (int j = 0; j < 4; j++) top[j] = splat(-__builtin_inff());
  for (; i < whole; i += STRIDE) {
    UNROLL for (int j = 0; j < 4; j++) {
      vf v = load_f32(row + i + j * LANES);
      unordered |= v != v;
      top[j] = max_vf(v, top[j]);
    }
  }
  best_of = max_vf(max_vf(top[0], top[1]), max_vf(top[2], top[3]));
  int has_nan = any_lane(unordered);
  float best = max_lanes(best_of);
  for (; i < n; i++) {
    has_nan |= row[i] != row[i];
    best = row[i] > best ? row[i] : best;
  }
  vf wanted = splat(best);
  for (i = 0; i < whole; i += STRIDE) {
    vi found = {};
    UNROLL for (int j = 0; j < 4; j++) {
      vf v = load_f32(row + i + j * LANES);
      found |= has_nan ? v != v : v == wanted;
    }
    if (any_lane(found)) break;
  }
  for (; i < n; i++) {
    if (has_nan ? row[i] != row[i] : row[i] == best) return (int32_t)i;
  }
  return 0;
}

static void argmax_fn(void *arg, int thread) {
  const argmax_job *job = arg;
  (void)thread;
  for (long r = pool_take(); r < job->rows; r = pool_take()) {
    job->out[r] = argmax_row(job->logits + r * job->n, job->n);
  }
}

/* logits is [rows][n], out is [rows]. */
void kun_argmax(const float *logits, int32_t *out, int64_t rows, int64_t n) {
  argmax_job job = {logits, out, rows, n};
  if (rows > 0) pool_run(argmax_fn, &job);
}
