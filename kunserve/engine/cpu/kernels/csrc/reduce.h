/* Sums over ranks: each rank has a part of the columns, and so a part of every sum. Needs typed.h
 * and linear.h. */
#include "ranks.h"

/* Where a rank leaves its part of a product, in float32; without ranks the product itself. */
INLINE linear_job part_of_sum(linear_job job, const kun_ranks *ranks) {
  if (ranks != NULL) {
    job.y = (float *)ranks->parts + ranks->rank * job.m * job.n;
    job.kind = KUN_FLOAT;
  }
  return job;
}

/* The rows [first, end) of a step that this rank norms and sums for all. */
INLINE long first_row(const kun_ranks *ranks, long rows) {
  return ranks == NULL ? 0 : rows * ranks->rank / ranks->size;
}
INLINE long end_row(const kun_ranks *ranks, long rows) {
  return ranks == NULL ? rows : rows * (ranks->rank + 1) / ranks->size;
}

/* Finish a product from its parts, once all ranks have left theirs. The order of the ranks is fixed,
 * so that all batches give the same. A thread has the rows that it has in `norm_part`. */
static void sum_part(const linear_job *job, const kun_ranks *ranks, int thread) {
  if (ranks == NULL) return;
  long first = first_row(ranks, job->m), rows = end_row(ranks, job->m) - first;
  long from = (first + rows * thread / kun_threads()) * job->n;
  long to = (first + rows * (thread + 1) / kun_threads()) * job->n;
  long stride = job->m * job->n;
  const float *parts = ranks->parts;
  elem *y = job->y;
  for (long i = from; i < to; i += LANES) {
    int left = to - i < LANES ? (int)(to - i) : LANES;
    vf sum = {};
    for (long r = 0; r < ranks->size; r++) {
      const float *part = parts + r * stride + i;
      sum += left < LANES ? load_part_f32(part, left) : load_f32(part);
    }
    sum = rounded(sum);
    if (job->kind == KUN_RESIDUAL) sum += load_some(y + i, left);
    store_some(y + i, sum, left);
  }
}

typedef struct {
  linear_job job;
  kun_ranks *ranks;
} lone_sum;

static void sum_fn(void *arg, int thread) {
  const lone_sum *lone = arg;
  ranks_barrier(lone->ranks);
  sum_part(&lone->job, lone->ranks, thread);
  ranks_barrier(lone->ranks);
}

/* y [rows][n], shared, becomes the sum of what the ranks have left in `ranks->parts`. */
void NAME(kun_rank_sum)(kun_ranks *ranks, elem *y, int64_t rows, int64_t n) {
  lone_sum lone = {{.y = y, .m = rows, .n = n, .kind = KUN_STORE}, ranks};
  pool_run(sum_fn, &lone);
}
