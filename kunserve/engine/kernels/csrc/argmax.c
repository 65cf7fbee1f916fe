/* The largest of each row of logits. */
#include <stdint.h>

#include "pool.h"
#include "vec.h"

typedef struct {
  const float *logits;
  int32_t *out;
  long rows, n;
} argmax_job;

/* The lowest index that holds the row's maximum; NaNs never win. */
static int32_t argmax_row(const float *row, long n) {
  vf top = splat(-__builtin_inff());
  long i = 0;
  for (; i + LANES <= n; i += LANES) top = max_vf(load_f32(row + i), top);
  float best = max_lanes(top);
  for (; i < n; i++) best = row[i] > best ? row[i] : best;
  for (i = 0; i < n && row[i] != best;) i++;
  return i < n ? (int32_t)i : 0;
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
