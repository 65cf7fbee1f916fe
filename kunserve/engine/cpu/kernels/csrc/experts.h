/* The sparse MLP: a router chooses some experts for each token, and only these are read. Rows are
 * grouped by expert, so each chosen expert is read once in a step. A token's experts are summed in
 * the order of their numbers, in float32, so its result does not depend on the batch around it.
 * Needs typed.h, linear.h and packed.h. */

/* What the parts of one step's MLP tell each other, carved out of `kun_buffers.routing`. */
typedef struct {
  float *logits;   /* [tokens][experts], and one of the shared expert */
  int32_t *chosen; /* [tokens][per token], ascending */
  float *weights;  /* of each of these */
  int32_t *rows;   /* [tokens * per token] whose rows, expert after expert */
  float *by;       /* the weight of each of these */
  int32_t *starts; /* [experts + 1] the first of these of each expert */
  int32_t *active; /* [experts] those that were chosen, ascending */
  int32_t *ends;   /* [experts] blocks of rows up to the end of each of those */
  int32_t *count;  /* how many were chosen */
  int32_t *every;  /* [tokens] 0, 1, 2, ... */
  float *shares;   /* [tokens] the weight of the shared expert */
} routing;

INLINE long logits_of(const kun_model *m) { return m->experts + (m->shared > 0); }

/* 4 (tokens (logits + 4 per token) + 3 experts + 2) bytes, and 8 tokens for a shared expert. */
INLINE routing routing_of(const kun_model *m, const kun_buffers *b, long tokens) {
  routing r;
  long slots = tokens * m->experts_per_token;
  r.logits = b->routing;
  r.chosen = (int32_t *)(r.logits + tokens * logits_of(m));
  r.weights = (float *)(r.chosen + slots);
  r.rows = (int32_t *)(r.weights + slots);
  r.by = (float *)(r.rows + slots);
  r.starts = (int32_t *)(r.by + slots);
  r.active = r.starts + m->experts + 1;
  r.ends = r.active + m->experts;
  r.count = r.ends + m->experts;
  r.every = r.count + 1;
  r.shares = (float *)(r.every + tokens);
  return r;
}

/* A product with the matrix of expert e, among those of all. */
INLINE packed_job of_expert(linear_job out, const void *all, int32_t format, long e, x_block *x) {
  long columns = panel_columns(&out), rows = is_gated(&out) ? 2 * out.n : out.n;
  long bytes = rows * out.k * (long)sizeof(elem);
  if (!is_exact(format)) {
    bytes = (out.n + columns - 1) / columns * panel_bytes(format, out.k / BLOCK);
  }
  out.w = (const elem *)((const char *)all + e * bytes);
  return packed_of(out, &format, &out.n, 1, x);
}

/* `factors` are those of rows [first, end), and `scratch` has room for a panel: for weights in the
 * elements' type. */
INLINE void any_panel(const packed_job *job, char *scratch, long panel, const char *factors,
                      long first, long end) {
  if (!is_exact(job->formats[0])) packed_pass(job, job->x, panel, first, end);
  else panel_pass(&job->out, scratch, panel, factors, first, end, panel_at(&job->out, panel + 1));
}

/* This thread's share of rounding so many elements for packed weights. */
static void round_part(x_block *to, const elem *x, long elements, int thread) {
  long blocks = elements / BLOCK, threads = kun_threads();
  round_blocks(to, x, blocks * thread / threads, blocks * (thread + 1) / threads);
}

/* Choose one token's experts, of equal ones the first. Any logits, NaN too, give valid numbers.
 * `row` becomes e^(row - its maximum). */
static void route_row(float *row, long experts, long per_token, int normalised, int32_t *chosen,
                      float *weights) {
  for (long e = 0; e < experts; e++) {
    long at = e;
    if (e >= per_token) {
      at = per_token - 1;
      if (!(row[e] > row[chosen[at]])) continue;
    }
    for (; at > 0 && row[e] > row[chosen[at - 1]]; at--) chosen[at] = chosen[at - 1];
    chosen[at] = (int32_t)e;
  }
  vf most = splat(row[chosen[0]]), sums = {};
  for (long e = 0; e < experts; e += LANES) {
    long left = experts - e;
    if (left >= LANES) {
      vf v = exp_vf(load_f32(row + e) - most);
      store_f32(row + e, v);
      sums += v;
    } else {
      store_part_f32(row + e, exp_vf(load_part_f32(row + e, (int)left) - most), (int)left);
      sums += load_part_f32(row + e, (int)left);
    }
  }
  for (long i = 1; i < per_token; i++) {
    int32_t e = chosen[i];
    long at = i;
    for (; at > 0 && chosen[at - 1] > e; at--) chosen[at] = chosen[at - 1];
    chosen[at] = e;
  }
  float sum = sum_lanes(sums);
  if (normalised) {
    sum = 0.0f;
    for (long i = 0; i < per_token; i++) sum += row[chosen[i]];
  }
  for (long i = 0; i < per_token; i++) weights[i] = row[chosen[i]] / sum;
}

static void route_part(const kun_model *m, const routing *r, long tokens, int thread) {
  long end = tokens * (thread + 1) / kun_threads(), k = m->experts_per_token;
  for (long t = tokens * thread / kun_threads(); t < end; t++) {
    float *row = r->logits + t * logits_of(m);
    if (m->shared > 0) {
      vf e = exp_vf((vf)-max_vf(splat(row[m->experts]), splat(-87.0f)));
      r->shares[t] = 1.0f / (1.0f + e[0]);
      r->every[t] = (int32_t)t;
    }
    route_row(row, m->experts, k, m->normalises_experts, r->chosen + t * k, r->weights + t * k);
  }
}

/* Order the step's rows by expert, of those experts that are here. One thread does it for all. */
static void group_rows(const kun_model *m, const routing *r, long tokens) {
  long experts = m->held_experts, k = m->experts_per_token, blocks = 0, count = 0;
  memset(r->starts, 0, (size_t)(experts + 1) * sizeof *r->starts);
  for (long i = 0; i < tokens * k; i++) {
    long e = r->chosen[i] - m->first_expert;
    if (e >= 0 && e < experts) r->starts[e + 1]++;
  }
  for (long e = 0; e < experts; e++) r->starts[e + 1] += r->starts[e];
  memcpy(r->ends, r->starts, (size_t)experts * sizeof *r->ends);
  for (long i = 0; i < tokens * k; i++) {
    long e = r->chosen[i] - m->first_expert;
    if (e < 0 || e >= experts) continue;
    long at = r->ends[e]++;
    r->rows[at] = (int32_t)(i / k);
    r->by[at] = r->weights[i];
  }
  for (long e = 0; e < experts; e++) {
    long rows = r->starts[e + 1] - r->starts[e];
    if (rows == 0) continue;
    blocks += blocks_of(rows, m->hidden * (long)sizeof(factor));
    r->active[count] = (int32_t)e;
    r->ends[count++] = (int32_t)blocks;
  }
  *r->count = (int32_t)count;
}

/* silu(gate) * up of every row. A piece of work is a run of panels over one block of an expert's
 * rows, which are copied side by side if they are more than one. */
static void experts_gate_up(const kun_model *m, const kun_layer *w, const kun_buffers *b,
                            const routing *r, int thread) {
  if (*r->count == 0) return;
  long hidden = m->hidden, inner = m->intermediate, panels = (inner + 7) / 8;
  int32_t format = w->experts_gate_up_format;
  long row_bytes = hidden * (long)sizeof(elem), blocks = r->ends[*r->count - 1];
  long runs = (kun_threads() * 6 + blocks - 1) / blocks, i = 0, copied = -1;
  if (runs > panels) runs = panels;
  long factor_row = hidden * (long)sizeof(factor);
  long rounded_row = hidden / BLOCK * (long)sizeof(x_block);
  char *scratch = pool_scratch(thread, (size_t)(row_bytes * PANEL + factor_row + X_BLOCK_BYTES));
  char *copies = scratch + row_bytes * PANEL;
  for (long piece = pool_take(); piece < blocks * runs; piece = pool_take()) {
    long block = piece / runs, run = piece % runs;
    while (block >= r->ends[i]) i++;
    long before = i ? r->ends[i - 1] : 0, of = r->ends[i] - before, e = r->active[i];
    long start = r->starts[e], rows = r->starts[e + 1] - start;
    long first = start + rows * (block - before) / of;
    long count = start + rows * (block - before + 1) / of - first;
    const int32_t *which = r->rows + first;
    const char *x = copies;
    if (!is_exact(format)) {
      if (count == 1) x = (const char *)b->rounded + which[0] * rounded_row;
      for (long row = 0; row < count && count > 1 && block != copied; row++) {
        memcpy(copies + row * rounded_row, (const char *)b->rounded + which[row] * rounded_row,
               (size_t)rounded_row);
      }
    } else {
      const elem *normed = b->normed;
      if (count == 1) x = factors_of(copies, normed + which[0] * hidden, 1, hidden);
      else if (block != copied) put_factors(copies, normed, which, count, hidden);
    }
    copied = block;
    linear_job out = {(const elem *)x, NULL, NULL, (elem *)b->gated + first * inner,
                      count, inner, hidden, KUN_SWIGLU};
    packed_job job = of_expert(out, w->experts_gate_up, format, e, (x_block *)x);
    for (long panel = panels * run / runs; panel < panels * (run + 1) / runs; panel++) {
      any_panel(&job, scratch, panel, x, 0, count);
    }
  }
}

/* Add some panels of weighted products to the sums of the tokens that `job` names. */
static void add_panels(const packed_job *job, char *scratch, long from, long to) {
  long rows = job->out.m, k = job->out.k, blocks = blocks_of(rows, k * (long)sizeof(factor));
  for (long block = 0; block < blocks; block++) {
    long first = rows * block / blocks, end = rows * (block + 1) / blocks;
    const char *factors = NULL;
    if (is_exact(job->formats[0])) {
      char *widened = scratch + k * PANEL * (long)sizeof(elem);
      factors = factors_of(widened, job->out.x + first * k, end - first, k);
    }
    for (long panel = from; panel < to; panel++) any_panel(job, scratch, panel, factors, first, end);
  }
}

/* The residual stream plus every token's weighted experts; of several ranks, this one's part of
 * that sum. A piece of work is a run of columns of all experts, so that their sums have one order
 * and need no lock. */
static void experts_down(const kun_model *m, const kun_layer *w, const kun_buffers *b,
                         const routing *r, long tokens, int thread) {
  long hidden = m->hidden, inner = m->intermediate, panels = (hidden + PANEL - 1) / PANEL;
  long widest = inner > m->shared ? inner : m->shared, runs = kun_threads() * 4;
  if (runs > panels) runs = panels;
  const kun_ranks *ranks = b->ranks;
  float *sums = b->sums;
  if (ranks != NULL) sums = (float *)ranks->parts + ranks->rank * tokens * hidden;
  size_t widened = factor_bytes(widest + X_BLOCK_BYTES / (long)sizeof(factor));
  char *scratch = pool_scratch(thread, (size_t)(widest * PANEL) * sizeof(elem) + widened);
  linear_job shared = {(const elem *)b->gated + tokens * m->experts_per_token * inner,
                       w->shared_down, NULL, sums, tokens, hidden, m->shared, KUN_WEIGHTED,
                       r->every, r->shares};
  packed_job shared_job = packed_of(shared, &w->shared_format, &hidden, 1, NULL);
  x_block *x_blocks = b->rounded;
  for (long run = pool_take(); run < runs; run = pool_take()) {
    long first_panel = panels * run / runs, end_panel = panels * (run + 1) / runs;
    long from = first_panel * PANEL, to = end_panel * PANEL;
    if (to > hidden) to = hidden;
    for (long t = 0; t < tokens; t++) {
      memset(sums + t * hidden + from, 0, (size_t)(to - from) * sizeof(float));
    }
    for (long i = 0; i < *r->count; i++) {
      long e = r->active[i], first = r->starts[e], rows = r->starts[e + 1] - first;
      linear_job out = {(const elem *)b->gated + first * inner, NULL, NULL, sums, rows, hidden,
                        inner, KUN_WEIGHTED, r->rows + first, r->by + first};
      packed_job job = of_expert(out, w->experts_down, w->experts_down_format, e,
                                 x_blocks + first * inner / BLOCK);
      add_panels(&job, scratch, first_panel, end_panel);
    }
    if (m->shared > 0) add_panels(&shared_job, scratch, first_panel, end_panel);
    for (long t = 0; t < tokens && ranks == NULL; t++) {
      for (long column = from; column < to; column += LANES) {
        int left = (int)(to - column);
        elem *y = (elem *)b->hidden + t * hidden + column;
        const float *sum = sums + t * hidden + column;
        vf v = left < LANES ? load_part_f32(sum, left) : load_f32(sum);
        store_some(y, load_some(y, left) + rounded(v), left);
      }
    }
  }
}

/* All of it, of rows that were normalised into b->normed. Run inside a pool job; the caller puts a
 * barrier before it and one after it. */
static void experts_part(const kun_model *m, const kun_layer *w, const kun_buffers *b, long tokens,
                         int thread) {
  routing r = routing_of(m, b, tokens);
  linear_job logits = {b->normed, w->router, NULL, r.logits, tokens, logits_of(m), m->hidden,
                       KUN_FLOAT};
  linear_job shared = {b->normed, w->shared_gate_up, NULL,
                       (elem *)b->gated + tokens * m->experts_per_token * m->intermediate,
                       tokens, m->shared, m->hidden, KUN_SWIGLU};
  packed_job shared_job = packed_of(shared, &w->shared_format, &shared.n, 1, NULL);
  linear_part(&logits, thread);
  pool_barrier();
  if (m->shared > 0) {
    linear_part(&shared_job.out, thread);
    pool_barrier();
  }
  route_part(m, &r, tokens, thread);
  if (!is_exact(w->experts_gate_up_format)) {
    round_part(b->rounded, b->normed, tokens * m->hidden, thread);
  }
  pool_barrier();
  if (thread == 0) group_rows(m, &r, tokens);
  pool_barrier();
  experts_gate_up(m, w, b, &r, thread);
  pool_barrier();
  if (!is_exact(w->experts_down_format)) {
    round_part(b->rounded, b->gated, tokens * m->experts_per_token * m->intermediate, thread);
    pool_barrier();
  }
  experts_down(m, w, b, &r, tokens, thread);
}

typedef struct {
  const kun_model *model;
  const kun_layer *weights;
  const kun_buffers *buffers;
  long tokens;
} experts_job;

static void experts_fn(void *arg, int thread) {
  const experts_job *job = arg;
  experts_part(job->model, job->weights, job->buffers, job->tokens, thread);
}

/* The sparse MLP alone: buffers->hidden += experts(buffers->normed). */
void NAME(kun_experts)(const kun_model *model, const kun_layer *weights, const kun_buffers *buffers,
                       int64_t tokens) {
  experts_job job = {model, weights, buffers, tokens};
  if (tokens > 0) pool_run(experts_fn, &job);
}
