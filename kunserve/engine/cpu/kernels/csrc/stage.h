/* A run of layers as one job: one wake-up of the workers per step, barriers between operations. */

typedef struct {
  const kun_model *model;
  const kun_layer *layers; /* indexed by absolute layer */
  const kun_batch *batch;
  const kun_buffers *buffers;
  long first, end;
  attention_plan plan; /* made by thread 0 before the first barrier */
  kun_batch kept;      /* what is left of the step behind K and V of the last layer */
  attention_plan kept_plan;
} stage_job;

/* The step as a layer that sees `window` tokens (0: all) has it. */
INLINE kun_batch seen_by(const kun_batch *batch, long window) {
  kun_batch seen = *batch;
  if (window > 0 && batch->local_tables != NULL) seen.tables = batch->local_tables;
  return seen;
}

/* The rows that this rank norms for all of them; without ranks all rows. */
static void norm_rows(const stage_job *stage, const elem *weight, long tokens, int thread) {
  const kun_model *m = stage->model;
  const kun_buffers *b = stage->buffers;
  long hidden = m->hidden;
  long first = first_row(b->ranks, tokens), rows = end_row(b->ranks, tokens) - first;
  norm_part((elem *)b->normed + first * hidden, (const elem *)b->hidden + first * hidden, weight,
            rows, hidden, m->eps, m->norm_offset, thread);
}

/* What would be added to the residual stream is normalised first. */
INLINE void give_to_norm(linear_job *job, void *normed) {
  job->y = normed;
  job->kind = KUN_STORE;
}

/* Of the same rows. Without a barrier behind it: so is the norm that follows, in each thread. */
static void add_normed(const stage_job *stage, const elem *weight, long tokens, int thread) {
  const kun_model *m = stage->model;
  const kun_buffers *b = stage->buffers;
  long hidden = m->hidden;
  long first = first_row(b->ranks, tokens), rows = end_row(b->ranks, tokens) - first;
  add_norm_part((elem *)b->hidden + first * hidden, (elem *)b->normed + first * hidden, weight, rows,
                hidden, m->eps, m->norm_offset, thread);
}

/* Queries into b->qkv, K and V into the cache. The caller puts a barrier behind it. */
static void place_layer(const stage_job *stage, long layer, int thread) {
  const kun_model *m = stage->model;
  const kun_layer *w = &stage->layers[layer];
  const kun_buffers *b = stage->buffers;
  long tokens = stage->batch->num_tokens, dim = m->head_dim;
  long q_size = m->heads * dim, qkv_size = q_size + 2 * m->kv_heads * dim;
  linear_job qkv = {b->normed, w->qkv, w->qkv_bias, b->qkv, tokens, qkv_size, m->hidden, KUN_STORE};
  long runs[] = {q_size, m->kv_heads * dim, m->kv_heads * dim};
  packed_job packed_qkv = packed_of(qkv, w->qkv_formats, runs, 3, b->rounded);
  kun_batch batch = seen_by(stage->batch, w->window);

  norm_rows(stage, w->input_norm, tokens, thread);
  ranks_barrier(b->ranks);
  any_part(&packed_qkv, thread);
  pool_barrier();
  if (m->whole_qk_norm && b->ranks != NULL) {
    squares_part(m, tokens, b->qkv, b->ranks, thread);
    ranks_barrier(b->ranks);
  }
  place_part(m, w, layer, &batch, b->qkv, b->ranks, thread);
}

/* The rest of a layer, of the tokens of `step`: their queries, and their rows of `hidden`. */
static void finish_layer(const stage_job *stage, const kun_batch *step, const attention_plan *plan,
                         long layer, int thread) {
  const kun_model *m = stage->model;
  const kun_layer *w = &stage->layers[layer];
  const kun_buffers *b = stage->buffers;
  kun_ranks *ranks = b->ranks;
  long tokens = step->num_tokens, hidden = m->hidden, q_size = m->heads * (long)m->head_dim;
  linear_job o = {b->mixed, w->o, w->o_bias, b->hidden, tokens, hidden, q_size, KUN_RESIDUAL};
  linear_job gate_up = {b->normed, w->gate_up, w->gate_up_bias, b->gated,
                        tokens, m->intermediate, hidden, m->gate};
  linear_job down = {b->gated, w->down, w->down_bias, b->hidden,
                     tokens, hidden, m->intermediate, KUN_RESIDUAL};
  if (w->attention_out_norm != NULL) give_to_norm(&o, b->normed);
  if (w->mlp_out_norm != NULL) give_to_norm(&down, b->normed);
  packed_job packed_o = packed_of(part_of_sum(o, ranks), &w->o_format, &hidden, 1, b->rounded);
  packed_job packed_gate_up = packed_of(gate_up, &w->gate_up_format, &gate_up.n, 1, b->rounded);
  packed_job packed_down =
      packed_of(part_of_sum(down, ranks), &w->down_format, &hidden, 1, b->rounded);
  kun_batch batch = seen_by(step, w->window);
  long q_stride = q_size + 2 * m->kv_heads * (long)m->head_dim; /* as place_layer leaves them */
  attention_job attention = {m, &batch, b->qkv, q_stride, b->mixed, layer, w->window, plan};

  attention_part(&attention, thread);
  pool_barrier();
  any_part(&packed_o, thread);
  ranks_barrier(ranks);
  sum_part(&o, ranks, thread);
  if (w->attention_out_norm != NULL) add_normed(stage, w->attention_out_norm, tokens, thread);
  norm_rows(stage, w->post_norm, tokens, thread);
  ranks_barrier(ranks);
  if (w->router != NULL) {
    experts_part(m, w, b, tokens, thread);
  } else {
    any_part(&packed_gate_up, thread);
    pool_barrier();
    any_part(&packed_down, thread);
  }
  ranks_barrier(ranks);
  sum_part(&down, ranks, thread); /* the next norm is of the same rows in each thread */
  if (w->mlp_out_norm != NULL) add_normed(stage, w->mlp_out_norm, tokens, thread);
}

/* From here on the step is its kept rows, each a sequence of one token: what it attends to does not
 * depend on who is computed beside it. One thread does it for all. Until the MLP `gated` is free,
 * and has at least 16 bytes of each token. */
static void keep_rows(void *arg) {
  stage_job *stage = arg;
  const kun_model *m = stage->model;
  const kun_batch *all = stage->batch;
  long num = all->num_kept, q_size = m->heads * (long)m->head_dim, sequence = 0;
  long stride = q_size + 2 * m->kv_heads * (long)m->head_dim;
  elem *qkv = stage->buffers->qkv, *hidden = stage->buffers->hidden;
  int32_t *rows = stage->buffers->gated, *q_starts = rows + num, *context_lens = q_starts + num + 1;
  for (long i = 0; i < num; i++) {
    long token = all->kept[i];
    while (all->q_starts[sequence + 1] <= token) sequence++;
    rows[i] = all->rows[sequence];
    q_starts[i] = (int32_t)i;
    context_lens[i] =
        all->context_lens[sequence] - (all->q_starts[sequence + 1] - 1 - (int32_t)token);
    if (token == i) continue;
    memcpy(qkv + i * stride, qkv + token * stride, (size_t)q_size * sizeof(elem));
    memcpy(hidden + i * m->hidden, hidden + token * m->hidden, (size_t)m->hidden * sizeof(elem));
  }
  q_starts[num] = (int32_t)num;
  stage->kept = *all;
  stage->kept.rows = rows;
  stage->kept.q_starts = q_starts;
  stage->kept.context_lens = context_lens;
  stage->kept.num_tokens = stage->kept.num_seqs = (int32_t)num;
  stage->kept_plan = plan_attention(m, &stage->kept);
}

static void run_layer(stage_job *stage, long layer, int thread) {
  const kun_batch *step = stage->batch;
  const attention_plan *plan = &stage->plan;
  place_layer(stage, layer, thread);
  if (layer == stage->end - 1 && step->kept != NULL) {
    if (step->num_kept == 0) return;
    pool_barrier_around(keep_rows, stage);
    step = &stage->kept;
    plan = &stage->kept_plan;
  } else {
    /* Parts of `o` go where the squares are. */
    ranks_barrier(stage->model->whole_qk_norm ? stage->buffers->ranks : NULL);
  }
  finish_layer(stage, step, plan, layer, thread);
}

static void stage_fn(void *arg, int thread) {
  stage_job *stage = arg;
  if (thread == 0) stage->plan = plan_attention(stage->model, stage->batch);
  for (long layer = stage->first; layer < stage->end; layer++) run_layer(stage, layer, thread);
}

/* Layers [first, end) over the step, `buffers->hidden` in place, K and V written to the cache. */
void NAME(kun_stage)(const kun_model *model, const kun_layer *layers, const kun_batch *batch,
                     const kun_buffers *buffers, int64_t first, int64_t end) {
  stage_job stage = {.model = model, .layers = layers, .batch = batch, .buffers = buffers,
                     .first = first, .end = end};
  if (batch->num_tokens > 0) pool_run(stage_fn, &stage);
}

typedef struct {
  const elem *x, *w;
  elem *y;
  long rows, n;
  float eps;
  int offset;
} norm_job;

static void norm_fn(void *arg, int thread) {
  const norm_job *job = arg;
  norm_part(job->y, job->x, job->w, job->rows, job->n, job->eps, job->offset, thread);
}

#define ALONE_ELEMENTS 8192 /* a thread takes as long for them as two that have to meet */

void NAME(kun_rms_norm)(const elem *x, const elem *w, elem *y, int64_t rows, int64_t n, float eps,
                        int32_t offset) {
  if (rows * n <= ALONE_ELEMENTS) {
    for (int64_t r = 0; r < rows; r++) norm_row(y + r * n, x + r * n, w, n, eps, offset);
    return;
  }
  norm_job job = {x, w, y, rows, n, eps, offset};
  pool_run(norm_fn, &job);
}

static void place_fn(void *arg, int thread) {
  const stage_job *stage = arg;
  kun_batch batch = seen_by(stage->batch, stage->layers->window);
  place_part(stage->model, stage->layers, stage->first, &batch, stage->buffers->qkv, NULL, thread);
}

/* Norm (if any) and rotate q and k of `qkv` in place; write K and V of layer `layer`. */
void NAME(kun_place)(const kun_model *model, const kun_layer *weights, const kun_batch *batch,
                     const kun_buffers *buffers, int64_t layer) {
  stage_job stage = {.model = model, .layers = weights, .batch = batch, .buffers = buffers,
                     .first = layer, .end = layer + 1};
  pool_run(place_fn, &stage);
}

/* One layer's attention, of K and V that are written first, if there are any. */
typedef struct {
  attention_job job;
  attention_plan plan;
  const elem *k, *v; /* [num_tokens] rows of [kv_heads * head_dim] */
  long k_stride, v_stride;
} lone_attention;

/* This thread's share. */
static void cache_part(const lone_attention *lone, int thread) {
  const kun_model *model = lone->job.model;
  const kun_batch *batch = lone->job.batch;
  long first = (long)batch->num_tokens * thread / kun_threads();
  long end = (long)batch->num_tokens * (thread + 1) / kun_threads();
  for (long s = 0; s < batch->num_seqs; s++) {
    long from = batch->q_starts[s], to = batch->q_starts[s + 1];
    const int32_t *table = batch->tables + (long)batch->rows[s] * batch->max_blocks;
    for (long t = from > first ? from : first; t < to && t < end; t++) {
      long position = batch->context_lens[s] - to + t, slot = position % model->block_size;
      elem *unit = unit_at(model, lone->job.layer, table[position / model->block_size]);
      cache_row(model, unit, 0, slot, lone->k + t * lone->k_stride);
      cache_row(model, unit, 1, slot, lone->v + t * lone->v_stride);
    }
  }
}

static void attention_fn(void *arg, int thread) {
  lone_attention *lone = arg;
  if (thread == 0) lone->plan = plan_attention(lone->job.model, lone->job.batch);
  if (lone->k != NULL) cache_part(lone, thread);
  pool_barrier();
  attention_part(&lone->job, thread);
}

/* Write the step's K and V of layer `layer`, unless they are NULL, and attend to `window` tokens (0:
 * all). Strides are from token to token, in elements. */
void NAME(kun_attend)(const kun_model *model, const kun_batch *batch, const elem *q,
                      int64_t q_stride, const elem *k, int64_t k_stride, const elem *v,
                      int64_t v_stride, elem *out, int64_t layer, int64_t window) {
  kun_batch seen = seen_by(batch, window);
  lone_attention lone = {{model, &seen, q, q_stride, out, layer, window, &lone.plan},
                         {0}, k, v, k_stride, v_stride};
  pool_run(attention_fn, &lone);
}

/* Attention alone: K and V are in the cache, `qkv` is as kun_place leaves it. */
void NAME(kun_attention)(const kun_model *model, const kun_batch *batch, const elem *qkv, elem *out,
                         int64_t layer, int64_t window) {
  int64_t stride = (model->heads + 2 * model->kv_heads) * (int64_t)model->head_dim;
  NAME(kun_attend)(model, batch, qkv, stride, NULL, 0, NULL, 0, out, layer, window);
}
