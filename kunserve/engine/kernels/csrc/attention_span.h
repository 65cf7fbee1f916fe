/* Attention of some rows over one span of keys. Needs typed.h, tile.h, rows.h.
 *
 * Keys pass in spans of SPAN absolute positions; softmax is online over the spans. A row's bits
 * depend on its own query and on absolute key positions only: a span that a row may not see
 * multiplies by 1 and adds 0. */
#define SPAN 64
/* Rows of a piece: keys are packed once for all of them, so that many are a third faster than few
 * in a long prompt. Fewer give every thread work where the step is short. */
#define MAX_ROWS 288
#define FEW_ROWS 36 /* >= MAX_HEADS_PER_KV_HEAD of attention.py */

typedef struct {
  const kun_model *model;
  const kun_batch *batch;
  const elem *qkv; /* [num_tokens][(heads + 2 kv_heads) * head_dim], rotated */
  elem *out;       /* [num_tokens][heads * head_dim] */
  long layer;
  long window; /* tokens that the layer sees, 0 if all */
  const struct attention_plan *plan; /* see attention.h */
} attention_job;

/* What some rows have seen: softmax numerators times values, their sum, and what both are relative
 * to. */
typedef struct {
  float *acc;          /* [rows][head_dim] */
  float *peak, *total; /* [rows] */
} seen_keys;

/* One thread's buffers for one piece of work. */
typedef struct {
  char *keys, *values; /* packed, SPAN * head_dim elements each */
  elem *q;             /* [MAX_ROWS][head_dim] */
  char *spread;        /* the same for `spread_dots`, where a kv head has few rows */
  elem *weights;       /* [MAX_ROWS][SPAN] softmax numerators */
  float *scores;       /* [MAX_ROWS][SPAN] */
  float *rescale;      /* [MAX_ROWS] */
  seen_keys seen;      /* of the segment so far */
  seen_keys before;    /* of the segments before, if there are any */
  int has_before;
  elem *zeros;         /* [head_dim] */
} attention_buffers;

typedef struct {
  const int32_t *table;
  long sequence;
  long token;   /* the first query's index in the step */
  long first;   /* and its absolute position */
  long queries; /* queries in this piece */
  long kv_head, num_kv_heads;
  long from, end;  /* key positions; `from` is a multiple of SPAN */
  long context;
  float *parts; /* of all pieces of the sequence; NULL where there is only this */
  long part, num_parts;
} attention_piece;

/* Where K and V of SPAN absolute positions lie. */
typedef struct {
  const char *keys[SPAN], *values[SPAN];
} key_span;

/* Fill `span` for positions [from, from + SPAN), or as many as the context has; `zeros` stands for
 * the rest, whose memory may be unwritten (or not there at all). */
INLINE void find_span(key_span *span, const attention_job *job, const attention_piece *piece,
                      long kv_head, long from, const elem *zeros) {
  const kun_model *model = job->model;
  long size = model->block_size, dim = model->head_dim, i = 0;
  long count = piece->context - from < SPAN ? piece->context - from : SPAN;
  for (long block = from / size, slot = from % size; i < count; block++, slot = 0) {
    const elem *unit = unit_at(model, job->layer, piece->table[block]);
    const elem *k = unit + (kv_head * size + slot) * dim;
    const elem *v = k + model->kv_heads * size * dim;
    for (; slot < size && i < count; slot++, i++, k += dim, v += dim) {
      span->keys[i] = (const char *)k;
      span->values[i] = (const char *)v;
    }
  }
  for (; i < SPAN; i++) span->keys[i] = span->values[i] = (const char *)zeros;
}

/* Bytes to be fetched into the L2 cache, in order of their addresses, which memory likes best. */
#define MAX_RUNS 256
typedef struct {
  const char *at[MAX_RUNS], *end[MAX_RUNS];
  int count, current;
  const char *next, *stop; /* of the current run */
} fetch_list;

INLINE void add_run(fetch_list *list, const void *at, long bytes) {
  if (list->count == MAX_RUNS) return; /* it is only a hint */
  list->at[list->count] = at;
  list->end[list->count++] = (const char *)at + bytes;
}

INLINE void next_run(fetch_list *list) {
  list->current++;
  list->next = list->current < list->count ? list->at[list->current] : NULL;
  list->stop = list->current < list->count ? list->end[list->current] : NULL;
}

/* The K and V that a piece needs of positions [from, from + SPAN). */
static void list_span(fetch_list *list, const attention_job *job, const attention_piece *piece,
                      long from) {
  const kun_model *model = job->model;
  long size = model->block_size, row = model->head_dim * (long)sizeof(elem), count;
  long end = piece->context - from < SPAN ? piece->context : from + SPAN;
  list->count = 0;
  for (long at = from; at < end; at += count) {
    long slot = at % size;
    count = size - slot < end - at ? size - slot : end - at;
    const char *unit = (const char *)unit_at(model, job->layer, piece->table[at / size]);
    if (piece->num_kv_heads == model->kv_heads && count == size) {
      add_run(list, unit, 2 * model->kv_heads * size * row);
      continue;
    }
    for (long half = 0; half < 2; half++) {
      for (long h = piece->kv_head; h < piece->kv_head + piece->num_kv_heads; h++) {
        add_run(list, unit + ((half * model->kv_heads + h) * size + slot) * row, count * row);
      }
    }
  }
  list->current = -1;
  next_run(list);
}

/* `bytes` further on, in the same blocks. */
INLINE void shift_span(key_span *span, long bytes) {
  for (long i = 0; i < SPAN; i++) {
    span->keys[i] += bytes;
    span->values[i] += bytes;
  }
}

INLINE void fetch_more(fetch_list *list, long lines) {
  while (lines > 0 && list->next < list->stop) {
    const char *at = list->next, *stop = at + lines * 64;
    if (stop > list->stop) stop = list->stop;
    lines -= (stop - at + 63) / 64;
    for (; at < stop; at += 64) __builtin_prefetch(at, 0, 2);
    list->next = at;
    if (at >= list->stop) next_run(list);
  }
}

#include "spread.h"

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
INLINE void pack_values(char *packed, const char *const *values, long dim, long keys) {
  for (long i = 0; i < keys; i += KEYS_PER_STEP, packed += dim * 4) {
    for (long d = 0; d < dim; d += 2 * LANES) {
      vi lanes[2];
      value_lanes(lanes, values + i, d, 2);
      *(vi_u *)(packed + d * 4) = lanes[0];
      *(vi_u *)(packed + (d + LANES) * 4) = lanes[1];
    }
  }
}

/* The sum of softmax numerators, with those of one more span. */
INLINE vf grown_total(vf total, vf rescale, vf sum) {
  return dot_f32(sum, (vi)total, (vi)rescale);
}

/* Softmax numerators of one row over a span, whose scores `s` [parts] are scaled, and hidden keys'
 * -inf; and how far the row's past results shrink. */
INLINE void soften(attention_buffers *b, long row, const vf *s, const int parts,
                   const int has_hidden) {
  const vf never = splat(-__builtin_inff());
  vf top = s[0], sum = {};
  UNROLL for (int j = 1; j < parts; j++) top = max_vf(top, s[j]);
  float peak = max_lanes(top), past = b->seen.peak[row];
  if (past > peak) peak = past;
  vf base = splat(peak == -__builtin_inff() ? 0.0f : peak);
  UNROLL for (int j = 0; j < parts; j++) {
    vf e = exp_vf(s[j] - base);
    if (has_hidden) e = choose(s[j] > never, e, (vf){});
    sum += e;
    store(b->weights + row * SPAN + j * LANES, e);
  }
  vf rescale = exp_vf(splat(past) - base);
  b->rescale[row] = rescale[0];
  b->seen.total[row] = grown_total(splat(b->seen.total[row]), rescale, splat(sum_lanes(sum)))[0];
  b->seen.peak[row] = peak;
}

/* The same of scores that are still to be multiplied by `factor`, of which some may be hidden. */
INLINE void soften_row(const attention_job *job, attention_buffers *b, long row, long position,
                       long from, long keys, float factor) {
  const vi iota = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  long window = job->window;
  int first = window > 0 && position - window + 1 > from ? (int)(position - window + 1 - from) : 0;
  int last = position - from < SPAN ? (int)(position - from) : SPAN - 1; /* may be negative */
  vf scale = splat(factor), s[SPAN / LANES];
  if (first == 0 && last == SPAN - 1) {
    UNROLL for (int j = 0; j < SPAN / LANES; j++) {
      s[j] = load_f32(b->scores + row * SPAN + j * LANES) * scale;
    }
    soften(b, row, s, SPAN / LANES, 0);
    return;
  }
  int parts = (int)(keys / LANES);
  for (int j = 0; j < SPAN / LANES; j++) {
    vi at = iota + j * LANES;
    vi visible = (at >= first) & (at <= last);
    vf score = j < parts ? load_f32(b->scores + row * SPAN + j * LANES) * scale : (vf){};
    s[j] = choose(visible, score, splat(-__builtin_inff()));
  }
  soften(b, row, s, SPAN / LANES, 1);
}

/* acc = acc * rescale + weights x V, for `width` vectors of columns from d on. V is packed, or where
 * `values` is not NULL taken from there: what few rows read is not worth packing. */
INLINE void blend_of(const int rows, const int width, const int is_packed, attention_buffers *b,
                     const char *const *values, fetch_list *list, long row, long d, long dim,
                     long steps) {
  vf acc[TILE_ROWS][4];
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < width; j++) {
    acc[i][j] = load_f32(b->seen.acc + (row + i) * dim + d + j * LANES) * splat(b->rescale[row + i]);
  }
  for (long s = 0; s < steps; s++) {
    vi v[4];
    if (is_packed) {
      UNROLL for (int j = 0; j < width; j++) {
        v[j] = *(const vi_u *)(b->values + (s * dim + d + j * LANES) * 4);
      }
    } else {
      fetch_more(list, width);
      value_lanes(v, values + s * KEYS_PER_STEP, d, width);
    }
    UNROLL for (int i = 0; i < rows; i++) {
      vi p = spread_4_bytes((const char *)(b->weights + (row + i) * SPAN) + s * 4);
      UNROLL for (int j = 0; j < width; j++) acc[i][j] = dot(acc[i][j], v[j], p);
    }
  }
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < width; j++) {
    store_f32(b->seen.acc + (row + i) * dim + d + j * LANES, acc[i][j]);
  }
}

#define PACKED(n, width) blend_of(n, width, 1, b, NULL, NULL, row, d, dim, steps)
#define DIRECT(n, width) blend_of(n, width, 0, b, values, list, row, d, dim, steps)
#define CALL_PACKED_4(n) PACKED(n, 4)
#define CALL_PACKED_2(n) PACKED(n, 2)
#define CALL_DIRECT_4(n) DIRECT(n, 4)
#define CALL_DIRECT_2(n) DIRECT(n, 2)

static void blend_packed(int rows, attention_buffers *b, long row, long dim, long steps) {
  long d = 0;
  for (; d + 64 <= dim; d += 64) WITH_CONSTANT_ROWS(rows, CALL_PACKED_4)
  for (; d < dim; d += 32) WITH_CONSTANT_ROWS(rows, CALL_PACKED_2)
}

static void blend_direct(int rows, attention_buffers *b, const char *const *values,
                         fetch_list *list, long row, long dim, long steps) {
  long d = 0;
  for (; d + 64 <= dim; d += 64) WITH_CONSTANT_ROWS(rows, CALL_DIRECT_4)
  for (; d < dim; d += 32) WITH_CONSTANT_ROWS(rows, CALL_DIRECT_2)
}

/* scores[row][i .. i + 16) for every row; scaled where there are many. */
INLINE void score_panel(const char *const *keys, fetch_list *list, attention_buffers *b, long i,
                        long rows, long row_bytes, float scale) {
  vf out[SWEEP_ROWS];
  const char *q = (const char *)b->q;
  if (rows <= SWEEP_ROWS) {
    spread_dots((int)rows, out, keys, b->spread, row_bytes, list);
    for (int r = 0; r < rows; r++) store_f32(b->scores + r * SPAN + i, out[r]);
    return;
  }
  long lines = row_bytes * TILE_ROWS / (4 * rows) + 1;
  pack_panel(b->keys, keys, row_bytes, NULL, 0);
  for (long row = 0; row < rows; row += TILE_ROWS) {
    int height = rows - row < TILE_ROWS ? (int)(rows - row) : TILE_ROWS;
    fetch_more(list, lines);
    tile(height, out, b->keys, q + row * row_bytes, row_bytes, row_bytes / 16, NULL);
    for (int r = 0; r < height; r++) store_f32(b->scores + (row + r) * SPAN + i, out[r] * scale);
  }
}

/* Softmax of `rows` rows, whose scores are to be multiplied by `factor`: see soften_many.h. */
static void soften_rows(const attention_job *job, const attention_piece *piece,
                        attention_buffers *b, long rows, long from, long keys, float factor);

/* Multiply the scores of some rows by `factor` and bend them: cap tanh(score / cap). */
static void cap_scores(float cap, float *scores, long rows, long count, float factor) {
  vf to_cap = splat(1.0f / cap), from_cap = splat(cap), by = splat(factor);
  for (long row = 0; row < rows; row++) {
    for (float *s = scores + row * SPAN; s < scores + row * SPAN + count; s += LANES) {
      store_f32(s, tanh_vf(load_f32(s) * by * to_cap) * from_cap);
    }
  }
}

/* One span of keys of one kv head, which starts at position `from`, for its rows of the piece.
 * What `list` has is fetched meanwhile, as much as is read here. */
static void attend_span(const attention_job *job, const attention_piece *piece,
                        attention_buffers *b, long from, const key_span *span, fetch_list *list) {
  long dim = job->model->head_dim, row_bytes = dim * (long)sizeof(elem);
  long group = job->model->heads / job->model->kv_heads, rows = piece->queries * group;
  long reach = piece->first + piece->queries - from; /* keys that the last query sees */
  long count = reach >= SPAN ? SPAN : (reach + LANES - 1) / LANES * LANES;
  float scale = 1.0f / __builtin_sqrtf((float)dim);
  for (long i = 0; i < count; i += PANEL) {
    score_panel(span->keys + i, list, b, i, rows, row_bytes, scale);
  }
  float factor = rows > SWEEP_ROWS ? 1.0f : scale;
  if (job->model->score_cap > 0) {
    cap_scores(job->model->score_cap, b->scores, rows, count, factor);
    factor = 1.0f;
  }
  soften_rows(job, piece, b, rows, from, count, factor);
  int packs = rows > 2 * TILE_ROWS;
  if (packs) pack_values(b->values, span->values, dim, count);
  for (long row = 0; row < rows; row += TILE_ROWS) {
    int height = rows - row < TILE_ROWS ? (int)(rows - row) : TILE_ROWS;
    if (packs) {
      fetch_more(list, SPAN * row_bytes * TILE_ROWS / (64 * rows) + 1);
      blend_packed(height, b, row, dim, count / KEYS_PER_STEP);
    } else {
      blend_direct(height, b, span->values, list, row, dim, count / KEYS_PER_STEP);
    }
  }
}
