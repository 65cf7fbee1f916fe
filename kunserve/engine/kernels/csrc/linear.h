/* y = x w^T with w in its plain [n][k] layout. Needs typed.h and tile.h. */

typedef struct {
  const elem *x; /* [m][k] */
  const elem *w; /* [n][k], or [2 n][k] where it is gated */
  const elem *bias;
  void *y; /* [m][n] */
  long m, n, k;
  int kind;
  const int32_t *to; /* for KUN_WEIGHTED */
  const float *by;
} linear_job;

#define X_BLOCK_BYTES (384 * 1024) /* rows of x that stay in the L2 cache while panels pass */

#define STREAMING_ROWS 64          /* up to here reading w is what takes the time */

INLINE int is_gated(const linear_job *job) {
  return job->kind == KUN_SWIGLU || job->kind == KUN_GEGLU;
}

/* Columns of y that one panel yields: a gated panel is 8 gate rows over 8 up rows. */
INLINE long panel_columns(const linear_job *job) { return is_gated(job) ? 8 : PANEL; }

INLINE void panel_rows(const char **rows, const linear_job *job, long column) {
  long row_bytes = job->k * (long)sizeof(elem), columns = panel_columns(job);
  for (int r = 0; r < PANEL; r++) {
    long at = column + r % columns;
    if (at > job->n - 1) at = job->n - 1;
    rows[r] = (const char *)job->w + (at + (r / columns) * job->n) * row_bytes;
  }
}

INLINE vf panel_bias(const linear_job *job, long column) {
  vf bias = {};
  if (job->bias == NULL) return bias;
  long left = job->n - column;
  if (!is_gated(job)) return load_some(job->bias + column, (int)left);
  int count = left < 8 ? (int)left : 8;
  vf gate = load_part(job->bias + column, count);
  vf up = load_part(job->bias + job->n + column, count);
  return choose((vi){-1, -1, -1, -1, -1, -1, -1, -1}, gate, fold(up, 8));
}

/* sum += by * v. */
INLINE void add_weighted(float *sum, vf v, float by, int left) {
  vf old = left < PANEL ? load_part_f32(sum, left) : load_f32(sum);
  vf new = dot_f32(old, (vi)v, (vi)splat(by));
  if (left < PANEL) store_part_f32(sum, new, left);
  else store_f32(sum, new);
}

/* Round, activate and store the rows of one tile. */
INLINE void finish_gated(const linear_job *job, const vf *tile_out, vf bias, long row, int rows,
                         long column) {
  long left = job->n - column < 8 ? job->n - column : 8;
  for (int i = 0; i < rows; i += 2) { /* two rows fill a vector */
    int second = i + 1 < rows ? i + 1 : i;
    vf a = rounded(tile_out[i] + bias), b = rounded(tile_out[second] + bias);
    vf gate = join_low(a, b), gated;
    gated = rounded(job->kind == KUN_GEGLU ? gelu_vf(gate) : silu_vf(gate)) * join_high(a, b);
    elem both[LANES], *y = (elem *)job->y + (row + i) * job->n + column;
    store(both, gated);
    for (int r = 0; r <= second - i; r++, y += job->n) {
      if (left == 8) memcpy(y, both + r * 8, 8 * sizeof(elem));
      else memcpy(y, both + r * 8, (size_t)left * sizeof(elem));
    }
  }
}

INLINE void finish(const linear_job *job, const vf *tile_out, vf bias, long row, int rows,
                   long column) {
  int left = job->n - column < PANEL ? (int)(job->n - column) : PANEL;
  if (is_gated(job)) {
    finish_gated(job, tile_out, bias, row, rows, column);
    return;
  }
  for (int i = 0; i < rows; i++) {
    vf v = tile_out[i] + bias;
    long at = (row + i) * job->n + column;
    elem *y = (elem *)job->y + at;
    switch (job->kind) {
      case KUN_STORE: store_some(y, v, left); break;
      case KUN_RESIDUAL: store_some(y, load_some(y, left) + rounded(v), left); break;
      case KUN_WEIGHTED:
        add_weighted((float *)job->y + job->to[row + i] * job->n + column, v, job->by[row + i],
                     left);
        break;
      default:
        if (left < PANEL) store_part_f32((float *)job->y + at, v, left);
        else store_f32((float *)job->y + at, v);
    }
  }
}

#ifdef AMX_LINEAR
static void amx_pass(const linear_job *job, long column, long first, long end);
#endif

/* One panel of columns for rows [first, end) of x, while fetching the panel after it. */
static void panel_pass(const linear_job *job, char *packed, long column, long first, long end) {
#ifdef AMX_LINEAR /* whatever the number of rows: see amx_linear.h */
  amx_pass(job, column, first, end);
  return;
#endif
  const char *rows[PANEL], *next[PANEL];
  vf out[SWEEP_ROWS];
  long row_bytes = job->k * (long)sizeof(elem), count = end - first;
  vf bias = panel_bias(job, column);
  panel_rows(rows, job, column);
  panel_rows(next, job, column + panel_columns(job));
  if (count <= DIRECT_ROWS) {
    direct((int)count, out, rows, (const char *)(job->x + first * job->k), row_bytes, row_bytes,
           next);
    finish(job, out, bias, first, (int)count, column);
    return;
  }
  /* Tiles of full height, and before them a sweep of the rest, which packs what they need. */
  long tiles = count > SWEEP_ROWS ? (count - SWEEP_ROWS + TILE_ROWS - 1) / TILE_ROWS : 0;
  int swept = (int)(count - tiles * TILE_ROWS), fetching = tiles < 3 ? (int)tiles : 3;
  sweep(swept, out, tiles ? packed : NULL, rows, (const char *)(job->x + first * job->k), row_bytes,
        row_bytes, next, PANEL - 4 * fetching);
  finish(job, out, bias, first, swept, column);
  for (long t = 0; t < tiles; t++) {
    long row = first + swept + t * TILE_ROWS;
    tile(TILE_ROWS, out, packed, (const char *)(job->x + row * job->k), row_bytes, row_bytes / 16,
         t < fetching ? next + PANEL - 4 * (fetching - t) : NULL);
    finish(job, out, bias, row, TILE_ROWS, column);
  }
}

/* Run inside a pool job; the caller puts a barrier before and after. */
static void linear_part(const linear_job *job, int thread) {
  long row_bytes = job->k * (long)sizeof(elem), columns = panel_columns(job);
  long panels = (job->n + columns - 1) / columns;
  long row_blocks = (job->m * row_bytes + X_BLOCK_BYTES - 1) / X_BLOCK_BYTES;
  /* Long runs of panels keep memory streaming; short ones share compute evenly with whoever else
   * wants the cores. */
  long chunk = job->m > STREAMING_ROWS ? 2 : panels / (kun_threads() * 6) + 1;
  long chunks = (panels + chunk - 1) / chunk;
  char *packed = pool_scratch(thread, (size_t)(row_bytes * PANEL));
  for (long piece = pool_take(); piece < chunks * row_blocks; piece = pool_take()) {
    long block = piece / chunks, from = piece % chunks * chunk;
    long to = from + chunk < panels ? from + chunk : panels;
    for (long panel = from; panel < to; panel++) {
      panel_pass(job, packed, panel * columns, job->m * block / row_blocks,
                 job->m * (block + 1) / row_blocks);
    }
  }
}

static void linear_job_fn(void *arg, int thread) { linear_part(arg, thread); }

/* A whole product as one call. k must be a multiple of 16 bytes' worth of elements. */
void NAME(kun_linear)(const elem *x, const elem *w, const elem *bias, void *y, int64_t m,
                      int64_t n, int64_t k, int32_t kind) {
  linear_job job = {x, w, bias, y, m, n, k, kind};
  if (m > 0) pool_run(linear_job_fn, &job);
}
