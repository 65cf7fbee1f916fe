/* Paged causal attention for decode and (chunked) prefill alike. Needs typed.h, tile.h, rows.h.
 *
 * A piece of work is (sequence, kv head, run of queries): its rows are the queries' heads that
 * share the kv head. Keys pass in spans of SPAN absolute positions, each packed once for all rows;
 * softmax is online over the spans. A row's bits depend on its own query and on absolute key
 * positions only: a span that a row may not see multiplies by 1 and adds 0. */
#define SPAN 64
/* Rows of a piece: keys are packed once for all of them, so that many are a third faster than few
 * in a long prompt. Fewer give every thread work where the step is short. */
#define MAX_ROWS 144
#define FEW_ROWS 36 /* >= MAX_HEADS_PER_KV_HEAD of attention.py */
#define PIECES_PER_THREAD 4

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

/* Where K and V of SPAN absolute positions lie. */
typedef struct {
  const char *keys[SPAN], *values[SPAN];
} key_span;

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

/* Fill `span` for positions [from, from + SPAN), or as many as the context has; `zeros` stands for
 * the rest, whose memory may be unwritten (or not there at all). */
INLINE void find_span(key_span *span, const attention_job *job, const attention_piece *piece,
                      long from, const elem *zeros) {
  const kun_model *model = job->model;
  long size = model->block_size, dim = model->head_dim, i = 0;
  long count = piece->context - from < SPAN ? piece->context - from : SPAN;
  for (long block = from / size, slot = from % size; i < count; block++, slot = 0) {
    const elem *unit = unit_at(model, job->layer, piece->table[block]);
    const elem *k = unit + (piece->kv_head * size + slot) * dim;
    const elem *v = k + model->kv_heads * size * dim;
    for (; slot < size && i < count; slot++, i++, k += dim, v += dim) {
      span->keys[i] = (const char *)k;
      span->values[i] = (const char *)v;
    }
  }
  for (; i < SPAN; i++) span->keys[i] = span->values[i] = (const char *)zeros;
}

/* 64 columns (or 32) of as many keys as 4 bytes hold, so that one dot adds them all: lane d of the
 * vectors is column d of those keys. */
#define KEYS_PER_STEP (4 / (long)sizeof(elem))
INLINE void value_lanes(vi *lanes, const char *const *values, long column, int vectors) {
  UNROLL for (int j = 0; j < vectors; j += 2) {
    const elem *first = (const elem *)values[0] + column + j * LANES;
#ifdef KUN_BF16
    vi even = *(const vi_u *)first;
    vi odd = *(const vi_u *)((const elem *)values[1] + column + j * LANES);
    lanes[j] = interleave_words(even, odd, 0);
    lanes[j + 1] = interleave_words(even, odd, 1);
#else
    lanes[j] = *(const vi_u *)first;
    lanes[j + 1] = *(const vi_u *)(first + LANES);
#endif
  }
}

/* Packed V: [step][head_dim] of those lanes. */
INLINE void pack_values(char *packed, const char *const *values, const char *const *next, long dim,
                        long keys) {
  for (long i = 0; i < keys; i += KEYS_PER_STEP, packed += dim * 4) {
    for (long d = 0; d < dim; d += 2 * LANES) {
      vi lanes[2];
      fetch(next + i, KEYS_PER_STEP, d * (long)sizeof(elem));
      value_lanes(lanes, values + i, d, 2);
      *(vi_u *)(packed + d * 4) = lanes[0];
      *(vi_u *)(packed + (d + LANES) * 4) = lanes[1];
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

/* acc = acc * rescale + weights x V, for `width` vectors of columns from d on. V is packed, or
 * where `values` is not NULL taken from there: what few rows read is not worth packing. */
INLINE void blend_of(const int rows, const int width, attention_buffers *b,
                     const char *const *values, const char *const *next, long row, long d,
                     long dim, long steps) {
  vf acc[TILE_ROWS][4];
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < width; j++) {
    acc[i][j] = load_f32(b->acc + (row + i) * dim + d + j * LANES) * splat(b->rescale[row + i]);
  }
  for (long s = 0; s < steps; s++) {
    vi v[4];
    if (values != NULL) {
      value_lanes(v, values + s * KEYS_PER_STEP, d, width);
      UNROLL for (int j = 0; j < width * 64; j += 64 * (int)KEYS_PER_STEP) {
        fetch(next + s * KEYS_PER_STEP, KEYS_PER_STEP, d * (long)sizeof(elem) + j);
      }
    } else UNROLL for (int j = 0; j < width; j++) {
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

static void blend(int rows, attention_buffers *b, const char *const *values,
                  const char *const *next, long row, long dim, long steps) {
  long d = 0;
#define CALL(n) blend_of(n, 4, b, values, next, row, d, dim, steps)
  for (; d + 64 <= dim; d += 64) WITH_CONSTANT_ROWS(rows, CALL)
#undef CALL
#define CALL(n) blend_of(n, 2, b, values, next, row, d, dim, steps)
  for (; d < dim; d += 32) WITH_CONSTANT_ROWS(rows, CALL)
#undef CALL
}

/* scores[row][i .. i + 16) for every row of the piece. */
INLINE void score_panel(const char *const *keys, const char *const *next, attention_buffers *b,
                        long i, long rows, long row_bytes) {
  vf out[TILE_ROWS > DIRECT_ROWS ? TILE_ROWS : DIRECT_ROWS];
  const char *q = (const char *)b->q;
  if (rows <= DIRECT_ROWS) {
    direct((int)rows, out, keys, q, row_bytes, row_bytes, next);
    for (int r = 0; r < rows; r++) store_f32(b->scores + r * SPAN + i, out[r]);
    return;
  }
  pack_panel(b->keys, keys, row_bytes, next, PANEL);
  for (long row = 0; row < rows; row += TILE_ROWS) {
    int height = rows - row < TILE_ROWS ? (int)(rows - row) : TILE_ROWS;
    tile(height, out, b->keys, q + row * row_bytes, row_bytes, row_bytes / 16, NULL);
    for (int r = 0; r < height; r++) store_f32(b->scores + (row + r) * SPAN + i, out[r]);
  }
}

/* One span of keys, which starts at position `from`, for every row of the piece. */
static void attend_span(const attention_job *job, const attention_piece *piece,
                        attention_buffers *b, long from, const key_span *span,
                        const key_span *next) {
  long dim = job->model->head_dim, row_bytes = dim * (long)sizeof(elem);
  long group = job->model->heads / job->model->kv_heads, rows = piece->queries * group;
  long reach = piece->first + piece->queries - from; /* keys that the last query sees */
  long count = reach >= SPAN ? SPAN : (reach + LANES - 1) / LANES * LANES;
  for (long i = 0; i < count; i += PANEL) {
    score_panel(span->keys + i, next->keys + i, b, i, rows, row_bytes);
  }
  for (long query = 0, row = 0; query < piece->queries; query++) {
    for (long h = 0; h < group; h++, row++) {
      soften_row(job, b, row, piece->first + query, from, count);
    }
  }
  if (rows > TILE_ROWS) pack_values(b->values, span->values, next->values, dim, count);
  for (long row = 0; row < rows; row += TILE_ROWS) {
    int height = rows - row < TILE_ROWS ? (int)(rows - row) : TILE_ROWS;
    blend(height, b, rows > TILE_ROWS ? NULL : span->values, next->values, row, dim,
          count / KEYS_PER_STEP);
  }
}

/* Bring in the queries. */
static void open_piece(const attention_job *job, const attention_piece *piece,
                       attention_buffers *b) {
  const kun_model *model = job->model;
  long dim = model->head_dim, group = model->heads / model->kv_heads;
  long stride = (model->heads + 2 * model->kv_heads) * dim, rows = piece->queries * group;
  const elem *q = job->qkv + piece->token * stride + piece->kv_head * group * dim;
  memset(b->acc, 0, (size_t)(rows * dim) * 4);
  for (long query = 0; query < piece->queries; query++) {
    memcpy(b->q + query * group * dim, q + query * stride, (size_t)(group * dim) * sizeof(elem));
  }
  for (long row = 0; row < rows; row++) {
    b->peak[row] = -__builtin_inff();
    b->total[row] = 0.0f;
  }
}

/* Write the results out. */
static void close_piece(const attention_job *job, const attention_piece *piece,
                        const attention_buffers *b) {
  long dim = job->model->head_dim, group = job->model->heads / job->model->kv_heads;
  elem *out = job->out + piece->token * job->model->heads * dim + piece->kv_head * group * dim;
  for (long query = 0, row = 0; query < piece->queries; query++) {
    for (long h = 0; h < group; h++, row++) {
      vf total = splat(b->total[row]);
      for (long d = 0; d < dim; d += LANES) {
        store(out + query * job->model->heads * dim + h * dim + d,
              load_f32(b->acc + row * dim + d) / total);
      }
    }
  }
}

/* The first span that any of the piece's queries sees. */
INLINE long first_span(const attention_job *job, const attention_piece *piece) {
  long hidden = job->model->window > 0 ? piece->first - job->model->window + 1 : 0;
  return hidden > 0 ? hidden / SPAN * SPAN : 0;
}

/* Work for one thread: pieces are numbered by sequence, then by run of queries (the last, which
 * has most keys, first), then by kv head. */
typedef struct {
  long sequence, before; /* `before` pieces belong to earlier sequences */
  long per_piece;        /* queries */
} piece_cursor;

INLINE piece_cursor first_piece(const attention_job *job) {
  long group = job->model->heads / job->model->kv_heads;
  long work = job->batch->num_tokens * job->model->kv_heads;
  long per_thread = work / (PIECES_PER_THREAD * kun_threads());
  long least = FEW_ROWS / group, most = MAX_ROWS / group;
  long per_piece = per_thread < least ? least : per_thread > most ? most : per_thread;
  return (piece_cursor){0, 0, per_piece};
}

INLINE int take_piece(const attention_job *job, piece_cursor *at, attention_piece *piece) {
  const kun_batch *batch = job->batch;
  long kv_heads = job->model->kv_heads, per_piece = at->per_piece;
  long queries, runs, s, taken = pool_take();
  for (;; at->sequence++, at->before += runs * kv_heads) {
    s = at->sequence;
    if (s == batch->num_seqs) return 0;
    queries = batch->q_starts[s + 1] - batch->q_starts[s];
    runs = (queries + per_piece - 1) / per_piece;
    if (taken < at->before + runs * kv_heads) break;
  }
  long skip = (runs - 1 - (taken - at->before) / kv_heads) * per_piece;
  piece->table = batch->tables + (long)batch->rows[s] * batch->max_blocks;
  piece->token = batch->q_starts[s] + skip;
  piece->first = batch->context_lens[s] - queries + skip;
  piece->queries = queries - skip < per_piece ? queries - skip : per_piece;
  piece->kv_head = (taken - at->before) % kv_heads;
  piece->context = batch->context_lens[s];
  return 1;
}

/* Run inside a pool job; the caller puts a barrier before and after. The next piece is known while
 * one is computed, so that its first keys are fetched in time. */
static void attention_part(const attention_job *job, int thread) {
  piece_cursor cursor = first_piece(job);
  attention_piece pieces[2], *piece = &pieces[0], *following = &pieces[1];
  key_span spans[2], *span = &spans[0], *next = &spans[1];
  if (!take_piece(job, &cursor, piece)) return;
  attention_buffers b = attention_scratch(thread, job->model->head_dim);
  memset(b.zeros, 0, (size_t)job->model->head_dim * sizeof(elem));
  find_span(span, job, piece, first_span(job, piece), b.zeros);
  *next = *span;
  for (int more = 1; more;) {
    more = take_piece(job, &cursor, following);
    long end = piece->first + piece->queries;
    open_piece(job, piece, &b);
    for (long from = first_span(job, piece); from < end; from += SPAN) {
      if (from + SPAN < end) find_span(next, job, piece, from + SPAN, b.zeros);
      else if (more) find_span(next, job, following, first_span(job, following), b.zeros);
      attend_span(job, piece, &b, from, span, next);
      key_span *spare = span;
      span = next;
      next = spare;
    }
    close_piece(job, piece, &b);
    attention_piece *done = piece;
    piece = following;
    following = done;
  }
}
