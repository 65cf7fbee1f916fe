/* Paged causal attention for decode and (chunked) prefill alike. Needs typed.h, tile.h, rows.h.
 *
 * A piece of work is (sequence, kv head, run of queries): its rows are the queries' heads that
 * share the kv head. Keys pass in spans of SPAN absolute positions, each packed once for all rows;
 * softmax is online over the spans. A row's bits depend on its own query and on absolute key
 * positions only: a span that a row may not see multiplies by 1 and adds 0. */
#define SPAN 64
#define MAX_ROWS 36

typedef struct {
  const kun_model *model;
  const kun_batch *batch;
  const elem *qkv; /* [num_tokens][(heads + 2 kv_heads) * head_dim], rotated */
  elem *out;       /* [num_tokens][heads * head_dim] */
  long layer;
} attention_job;

/* One thread's buffers for one piece of work. */
typedef struct {
  char *keys, *values; /* packed, SPAN * head_dim elements each */
  elem *q;             /* [MAX_ROWS][head_dim] */
  elem *weights;       /* [MAX_ROWS][SPAN] softmax numerators */
  float *scores;       /* [MAX_ROWS][SPAN] */
  float *acc;          /* [MAX_ROWS][head_dim] */
  float *rescale, *peak, *total; /* [MAX_ROWS] */
  elem *zeros;                   /* [head_dim] */
} attention_buffers;

typedef struct {
  const int32_t *table;
  long token;   /* the first query's index in the step */
  long first;   /* and its absolute position */
  long queries; /* queries in this piece */
  long kv_head, context;
} attention_piece;

INLINE void *carve(char **at, long bytes) {
  void *p = *at;
  *at += (bytes + 63) / 64 * 64;
  return p;
}

INLINE attention_buffers attention_scratch(int thread, long dim) {
  long span_bytes = SPAN * dim * (long)sizeof(elem), rows = MAX_ROWS;
  char *at = pool_scratch(thread, (size_t)(2 * span_bytes + rows * (dim + SPAN) * 8 + dim * 4 + 8192));
  attention_buffers b;
  b.keys = carve(&at, span_bytes);
  b.values = carve(&at, span_bytes);
  b.q = carve(&at, rows * dim * (long)sizeof(elem));
  b.weights = carve(&at, rows * SPAN * (long)sizeof(elem));
  b.scores = carve(&at, rows * SPAN * 4);
  b.acc = carve(&at, rows * dim * 4);
  b.rescale = carve(&at, rows * 4);
  b.peak = carve(&at, rows * 4);
  b.total = carve(&at, rows * 4);
  b.zeros = carve(&at, dim * (long)sizeof(elem));
  return b;
}

/* Pointers to the K and V rows of positions [from, from + SPAN); `zeros` past the context, whose
 * memory may be unwritten (or not there at all). */
INLINE void span_rows(const attention_job *job, const attention_piece *piece, long from,
                      const elem *zeros, const char **keys, const char **values) {
  const kun_model *model = job->model;
  long size = model->block_size, dim = model->head_dim;
  long count = piece->context - from < SPAN ? piece->context - from : SPAN;
  for (long i = 0; i < count;) {
    long slot = (from + i) % size;
    const elem *unit = unit_at(model, job->layer, piece->table[(from + i) / size]);
    const elem *k = unit + (piece->kv_head * size + slot) * dim;
    const elem *v = k + model->kv_heads * size * dim;
    for (; slot < size && i < count; slot++, i++, k += dim, v += dim) {
      keys[i] = (const char *)k;
      values[i] = (const char *)v;
    }
  }
  for (long i = count > 0 ? count : 0; i < SPAN; i++) keys[i] = values[i] = (const char *)zeros;
}

/* Fetch the span at `from` into the L2 cache: blocks are scattered, so the hardware will not. */
INLINE void fetch_span(const attention_job *job, const attention_piece *piece, long from) {
  const char *keys[SPAN], *values[SPAN];
  if (from >= piece->context) return;
  long bytes = job->model->head_dim * (long)sizeof(elem);
  long count = piece->context - from < SPAN ? piece->context - from : SPAN;
  span_rows(job, piece, from, NULL, keys, values);
  for (long i = 0; i < count; i++) {
    for (long at = 0; at < bytes; at += 64) {
      __builtin_prefetch(keys[i] + at, 0, 2);
      __builtin_prefetch(values[i] + at, 0, 2);
    }
  }
}

/* Packed V: [4 bytes' worth of keys][head_dim][4 bytes], so that one dot adds 1 or 2 keys. */
#define KEYS_PER_STEP (4 / (long)sizeof(elem))
INLINE void pack_values(char *packed, const char *const *values, long dim, long keys) {
  for (long i = 0; i < keys; i += KEYS_PER_STEP) {
    for (long d = 0; d < dim; d += LANES) {
      vi lanes;
#ifdef KUN_BF16
      vi even = (vi)load((const elem *)values[i] + d);
      vi odd = (vi)load((const elem *)values[i + 1] + d);
      lanes = ((even >> 16) & 0xffff) | odd;
#else
      lanes = *(const vi_u *)((const elem *)values[i] + d);
#endif
      *(vi_u *)(packed + (i / KEYS_PER_STEP * dim + d) * 4) = lanes;
    }
  }
}

/* Softmax numerators of one row over a span, and how far its past results shrink. */
INLINE void soften_row(const attention_job *job, attention_buffers *b, long row, long position,
                       long from, long keys) {
  const vi iota = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const vf never = splat(-__builtin_inff());
  long window = job->model->window;
  int first = window > 0 && position - window + 1 > from ? (int)(position - window + 1 - from) : 0;
  int last = position - from < SPAN ? (int)(position - from) : SPAN - 1; /* may be negative */
  vf scale = splat(1.0f / __builtin_sqrtf((float)job->model->head_dim));
  vf s[SPAN / LANES], top = never, sum = {};
  int parts = (int)(keys / LANES);
  for (int j = 0; j < parts; j++) {
    vi at = iota + j * LANES;
    vi visible = (at >= first) & (at <= last);
    s[j] = choose(visible, load_f32(b->scores + row * SPAN + j * LANES) * scale, never);
    top = max_vf(top, s[j]);
  }
  float peak = max_lanes(top), past = b->peak[row];
  if (past > peak) peak = past;
  vf base = splat(peak == -__builtin_inff() ? 0.0f : peak);
  for (int j = 0; j < parts; j++) {
    vf e = choose(s[j] > never, exp_vf(s[j] - base), (vf){});
    sum += e;
    store(b->weights + row * SPAN + j * LANES, e);
  }
  b->rescale[row] = exp_vf(splat(past) - base)[0];
  b->total[row] = b->total[row] * b->rescale[row] + sum_lanes(sum);
  b->peak[row] = peak;
}

/* acc = acc * rescale + weights x packed V, for `width` vectors of columns from d on. */
INLINE void blend_of(const int rows, const int width, attention_buffers *b, long row, long d,
                     long dim, long steps) {
  vf acc[TILE_ROWS][4];
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < width; j++) {
    acc[i][j] = load_f32(b->acc + (row + i) * dim + d + j * LANES) * splat(b->rescale[row + i]);
  }
  for (long s = 0; s < steps; s++) {
    vi v[4];
    UNROLL for (int j = 0; j < width; j++) {
      v[j] = *(const vi_u *)(b->values + (s * dim + d + j * LANES) * 4);
    }
    UNROLL for (int i = 0; i < rows; i++) {
      vi p = spread_4_bytes((const char *)(b->weights + (row + i) * SPAN) + s * 4);
      UNROLL for (int j = 0; j < width; j++) acc[i][j] = dot(acc[i][j], v[j], p);
    }
  }
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < width; j++) {
    store_f32(b->acc + (row + i) * dim + d + j * LANES, acc[i][j]);
  }
}

static void blend(int rows, attention_buffers *b, long row, long dim, long steps) {
  long d = 0;
#define CALL(n) blend_of(n, 4, b, row, d, dim, steps)
  for (; d + 64 <= dim; d += 64) WITH_CONSTANT_ROWS(rows, CALL)
#undef CALL
#define CALL(n) blend_of(n, 2, b, row, d, dim, steps)
  for (; d < dim; d += 32) WITH_CONSTANT_ROWS(rows, CALL)
#undef CALL
}

/* One span of keys for every row of the piece. */
static void attend_span(const attention_job *job, const attention_piece *piece,
                        attention_buffers *b, long from) {
  const char *keys[SPAN], *values[SPAN];
  vf out[TILE_ROWS];
  long dim = job->model->head_dim, row_bytes = dim * (long)sizeof(elem);
  long group = job->model->heads / job->model->kv_heads, rows = piece->queries * group;
  long reach = piece->first + piece->queries - from; /* keys that the last query sees */
  long count = reach >= SPAN ? SPAN : (reach + LANES - 1) / LANES * LANES;
  span_rows(job, piece, from, b->zeros, keys, values);
  for (long i = 0; i < count; i += PANEL) {
    pack_panel(b->keys, keys + i, row_bytes, b->keys, 0);
    for (long row = 0; row < rows; row += TILE_ROWS) {
      int height = rows - row < TILE_ROWS ? (int)(rows - row) : TILE_ROWS;
      tile(height, out, b->keys, (const char *)(b->q + row * dim), row_bytes, row_bytes / 16, NULL);
      for (int r = 0; r < height; r++) store_f32(b->scores + (row + r) * SPAN + i, out[r]);
    }
  }
  for (long row = 0; row < rows; row++) {
    soften_row(job, b, row, piece->first + row / group, from, count);
  }
  pack_values(b->values, values, dim, count);
  for (long row = 0; row < rows; row += TILE_ROWS) {
    int height = rows - row < TILE_ROWS ? (int)(rows - row) : TILE_ROWS;
    blend(height, b, row, dim, count / KEYS_PER_STEP);
  }
}

static void attend_piece(const attention_job *job, const attention_piece *piece, int thread) {
  const kun_model *model = job->model;
  long dim = model->head_dim, group = model->heads / model->kv_heads;
  long stride = (model->heads + 2 * model->kv_heads) * dim, rows = piece->queries * group;
  long start = model->window > 0 && piece->first >= model->window
                   ? (piece->first - model->window + 1) / SPAN * SPAN : 0;
  attention_buffers b = attention_scratch(thread, dim);
  fetch_span(job, piece, start);
  memset(b.acc, 0, (size_t)(rows * dim) * 4);
  memset(b.zeros, 0, (size_t)dim * sizeof(elem));
  for (long row = 0; row < rows; row++) {
    const elem *q = job->qkv + (piece->token + row / group) * stride;
    memcpy(b.q + row * dim, q + (piece->kv_head * group + row % group) * dim,
           (size_t)dim * sizeof(elem));
    b.peak[row] = -__builtin_inff();
    b.total[row] = 0.0f;
  }
  for (long from = start; from < piece->first + piece->queries; from += SPAN) {
    fetch_span(job, piece, from + SPAN);
    attend_span(job, piece, &b, from);
  }
  for (long row = 0; row < rows; row++) {
    elem *out = job->out + (piece->token + row / group) * model->heads * dim +
                (piece->kv_head * group + row % group) * dim;
    vf total = splat(b.total[row]);
    for (long d = 0; d < dim; d += LANES) store(out + d, load_f32(b.acc + row * dim + d) / total);
  }
}

/* Run inside a pool job; the caller puts a barrier before and after. Pieces are numbered by
 * sequence, then by run of queries (the last, which has most keys, first), then by kv head. */
static void attention_part(const attention_job *job, int thread) {
  const kun_batch *batch = job->batch;
  long kv_heads = job->model->kv_heads, group = job->model->heads / kv_heads;
  long per_piece = MAX_ROWS / group, s = 0, before = 0;
  for (long taken = pool_take();; taken = pool_take()) {
    long queries, runs;
    for (;; s++, before += runs * kv_heads) {
      if (s == batch->num_seqs) return;
      queries = batch->q_starts[s + 1] - batch->q_starts[s];
      runs = (queries + per_piece - 1) / per_piece;
      if (taken < before + runs * kv_heads) break;
    }
    long run = runs - 1 - (taken - before) / kv_heads, context = batch->context_lens[s];
    long skip = run * per_piece, left = queries - skip;
    attention_piece piece = {batch->tables + (long)batch->rows[s] * batch->max_blocks,
                             batch->q_starts[s] + skip, context - queries + skip,
                             left < per_piece ? left : per_piece, (taken - before) % kv_heads,
                             context};
    attend_piece(job, &piece, thread);
  }
}
