/* The largest of each row of logits. */
#include <math.h>
#include <stdint.h>

#include "pool.h"
#include "vec.h"

/* A row is read once. Then only the stretch that has its maximum is looked through. */
#define STRETCH 1024

typedef struct {
  float value; /* a NaN if the row has one */
  long index;
} top;

typedef struct {
  const float *logits;
  int32_t *out; /* either the indices alone */
  float *pairs; /* or each value and its index, as numbers */
  long rows, n, first;
} argmax_job;

/* The maximum of a stretch; has_nan gets bits where there is one. NaNs never win. */
INLINE float stretch_max(const float *row, long n, vi *has_nan) {
  vf tops[4];
  UNROLL for (int k = 0; k < 4; k++) tops[k] = splat(-__builtin_inff());
  long i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES) {
    UNROLL for (int k = 0; k < 4; k++) {
      vf v = load_f32(row + i + k * LANES);
      *has_nan |= v != v;
      tops[k] = max_vf(v, tops[k]);
    }
  }
  float best = max_lanes(max_vf(max_vf(tops[0], tops[1]), max_vf(tops[2], tops[3])));
  for (; i < n; i++) {
    if (row[i] != row[i]) (*has_nan)[0] = -1;
    best = row[i] > best ? row[i] : best;
  }
  return best;
}

/* The maximum and the lowest index that holds it. */
static top top_of(const float *row, long n) {
  float best = -__builtin_inff();
  long at = 0;
  vi has_nan = {};
  for (long first = 0; first < n; first += STRETCH) {
    long length = n - first < STRETCH ? n - first : STRETCH;
    float found = stretch_max(row + first, length, &has_nan);
    if (found > best) {
      best = found;
      at = first;
    }
  }
  for (int lane = 0; lane < LANES; lane++) {
    if (has_nan[lane]) return (top){NAN, 0};
  }
  while (row[at] != best) at++;
  return (top){best, at};
}

static void argmax_fn(void *arg, int thread) {
  const argmax_job *job = arg;
  (void)thread;
  for (long r = pool_take(); r < job->rows; r = pool_take()) {
    top found = top_of(job->logits + r * job->n, job->n);
    if (job->pairs == NULL) {
      job->out[r] = (int32_t)found.index;
    } else {
      job->pairs[2 * r] = found.value;
      job->pairs[2 * r + 1] = (float)(job->first + found.index);
    }
  }
}

/* logits is [rows][n], out is [rows]. */
void kun_argmax(const float *logits, int32_t *out, int64_t rows, int64_t n) {
  argmax_job job = {logits, out, NULL, rows, n, 0};
  if (rows > 0) pool_run(argmax_fn, &job);
}

/* pairs is [rows][2]: the largest logit, or a NaN if there is one, and `first` + its index, which
 * must be below 2^24. */
void kun_largest(const float *logits, float *pairs, int64_t rows, int64_t n, int64_t first) {
  argmax_job job = {logits, NULL, pairs, rows, n, first};
  if (rows > 0) pool_run(argmax_fn, &job);
}
