/* What the attention of some rows over one span of keys works on. Needs typed.h, tile.h, rows.h.
 *
 * Keys pass in spans of SPAN absolute positions; softmax is online over the spans. A row's bits
 * depend on its own query and on absolute key positions only: a span that a row may not see
 * multiplies by 1 and adds 0. */
#define SPAN 64
/* Rows of a piece: keys are packed once for all of them, so that many are a third faster than few
 * in a long prompt. Fewer give every thread work where the step is short. */
#define MAX_ROWS 288
#define FEW_ROWS 36 /* >= MAX_HEADS_PER_KV_HEAD of attention.py */

/* Softmax numerators, rounded to elements. With AVX2 they lie as floats, because products are. */
#if defined(WIDENS_X) && PIECE < LANES
#define WIDENS_WEIGHTS
typedef float weight;
#else
typedef elem weight;
#endif

typedef struct {
  const kun_model *model;
  const kun_batch *batch;
  const elem *q; /* [num_tokens] rows of [heads * head_dim], rotated */
  long q_stride; /* from one to the next, in elements */
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
  char *spread;        /* the same for `spread_dots`, where a kv head has few rows; else as factors */
  weight *weights;     /* [MAX_ROWS][SPAN] softmax numerators */
  float *scores;       /* [MAX_ROWS][SPAN] */
  float *rescale;      /* [MAX_ROWS] */
  seen_keys seen;      /* of the segment so far */
  seen_keys before;    /* of the segments before, if there are any */
  int has_before;
  char *room;          /* [SPAN][head_dim] */
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

/* The first row of a kv head's tiles of which any row sees a key from `key` on. */
INLINE long first_seeing(const attention_piece *piece, long group, long key) {
  long blind = (key - piece->first) * group;
  return piece->num_kv_heads > 1 || blind <= 0 ? 0 : blind / TILE_ROWS * TILE_ROWS;
}

/* Of `count` keys from `from` on, whole panels, those that rows up to `row` of a kv head see. */
INLINE long keys_seen(const attention_piece *piece, long group, long row, long from, long count) {
  long seen = (piece->first + row / group - from + PANEL) / PANEL * PANEL;
  return piece->num_kv_heads > 1 || seen > count ? count : seen;
}

/* Where the K of kv head 0 lies for SPAN absolute positions: each run of PANEL in its block. */
typedef struct {
  const char *panels[SPAN / PANEL]; /* NULL if it is not in one block, or beyond the context */
  int is_whole[SPAN / PANEL];       /* all of it is in the context */
} span_place;

static span_place find_span(const attention_job *job, const attention_piece *piece, long from) {
  const kun_model *model = job->model;
  long size = model->block_size, row_bytes = model->head_dim * (long)sizeof(elem);
  long block = from / size, slot = from % size;
  span_place place = {{NULL}, {0}};
  for (long p = 0; p < SPAN / PANEL && from + p * PANEL < piece->context; p++) {
    if (slot + PANEL <= size) {
      const char *unit = (const char *)unit_at(model, job->layer, piece->table[block]);
      place.panels[p] = unit + slot * row_bytes;
      place.is_whole[p] = from + (p + 1) * PANEL <= piece->context;
    }
    for (slot += PANEL; slot >= size; slot -= size) block++;
  }
  return place;
}

/* From a block's K of kv head 0 to its K (half 0) or V (half 1) of another. */
INLINE long head_offset(const kun_model *model, int half, long kv_head) {
  long rows = (half * model->kv_heads + kv_head) * model->block_size;
  return rows * model->head_dim * (long)sizeof(elem);
}

/* PANEL rows side by side, where they do not lie so. Zeros stand for what is beyond the context: its
 * memory may be unwritten, or not there at all. */
static void copy_panel(const attention_job *job, const attention_piece *piece, long offset, long at,
                       char *room) {
  const kun_model *model = job->model;
  long size = model->block_size, row_bytes = model->head_dim * (long)sizeof(elem);
  for (long i = 0; i < PANEL; i++, at++, room += row_bytes) {
    if (at < piece->context) {
      const char *unit = (const char *)unit_at(model, job->layer, piece->table[at / size]);
      memcpy(room, unit + offset + at % size * row_bytes, (size_t)row_bytes);
    } else {
      memset(room, 0, (size_t)row_bytes);
    }
  }
}

/* K or V of a kv head at `count` (a multiple of PANEL) positions of a span. */
typedef struct {
  const char *panels[SPAN / PANEL];
} span_rows;

INLINE span_rows rows_at(const attention_job *job, const attention_piece *piece,
                         const span_place *place, int half, long kv_head, long from, long count,
                         char *room) {
  long offset = head_offset(job->model, half, kv_head);
  long panel_bytes = PANEL * job->model->head_dim * (long)sizeof(elem);
  span_rows rows = {{NULL}};
  for (long p = 0; p < count / PANEL; p++) {
    if (place->is_whole[p]) {
      rows.panels[p] = place->panels[p] + offset;
    } else {
      rows.panels[p] = room + p * panel_bytes;
      copy_panel(job, piece, offset, from + p * PANEL, room + p * panel_bytes);
    }
  }
  return rows;
}

/* Panels to be fetched while others are read: into the L2 cache all that the next span needs, in
 * order of their addresses, which memory likes best; and into the L1 cache what is read NEAR_BYTES
 * later, because memory drops fetches that it has no room for. */
#define MAX_FETCHED 512
#define NEAR_BYTES 4096
typedef struct {
  const char *far[MAX_FETCHED], *near[MAX_FETCHED];
  int num_far, num_near;
  int current; /* panels read of this span */
} fetch_list;

/* What to fetch while one panel is read. */
typedef struct {
  const char *far, *near;
} fetched_pair;

/* While the panel that is now at `idle` is read: itself where there is no other. */
INLINE fetched_pair next_fetched(fetch_list *list, const char *idle) {
  int at = list->current++;
  return (fetched_pair){at < list->num_far ? list->far[at] : idle,
                        at < list->num_near ? list->near[at] : idle};
}

/* A few lines of both, from byte `at` of the panels on. */
INLINE void fetch_lines(fetched_pair from, long at, const long lines) {
  UNROLL for (long i = 0; i < lines; i++) __builtin_prefetch(from.far + at + i * 64, 0, 2);
  UNROLL for (long i = 0; i < lines; i++) __builtin_prefetch(from.near + at + i * 64, 0, 3);
}

/* What a piece needs of the next span. */
INLINE void list_far(fetch_list *list, const attention_job *job, const attention_piece *piece,
                     const span_place *place) {
  for (long p = 0; p < SPAN / PANEL; p++) {
    if (place->panels[p] == NULL) continue;
    for (int half = 0; half < 2; half++) {
      for (long head = 0; head < piece->num_kv_heads; head++) {
        if (list->num_far == MAX_FETCHED) return; /* it is only a hint */
        long offset = head_offset(job->model, half, piece->kv_head + head);
        list->far[list->num_far++] = place->panels[p] + offset;
      }
    }
  }
}

/* What it reads of this span, but for the first `skipped` panels, in the order of reading. */
INLINE void list_near(fetch_list *list, const attention_job *job, const attention_piece *piece,
                      const span_place *place, long skipped, long most) {
  for (int half = 0; half < 2; half++) {
    for (long head = 0; head < piece->num_kv_heads; head++) {
      long offset = head_offset(job->model, half, piece->kv_head + head);
      for (long p = 0; p < SPAN / PANEL; p++) {
        if (place->panels[p] == NULL || skipped-- > 0) continue;
        if (list->num_near == MAX_FETCHED || most-- == 0) return;
        list->near[list->num_near++] = place->panels[p] + offset;
      }
    }
  }
}
