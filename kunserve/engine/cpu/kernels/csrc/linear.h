/* y = x w^T with w in the elements' type: in panels (panel_tile.h), or row after row. Needs typed.h
 * and panel_tile.h. */

typedef struct {
  const elem *x; /* [m][k] */
  const elem *w; /* [n][k], or [2 n][k] where it is gated */
  const elem *bias;
  void *y; /* [m][n] */
  long m, n, k;
  int kind;
  const int32_t *to; /* for KUN_WEIGHTED */
  const float *by;
  long panels; /* with which w begins; behind them, and where there are none, rows are plain */
} linear_job;

#define X_BLOCK_BYTES (384 * 1024) /* of factors, which stay in the L2 cache while panels pass */

/* In how many blocks rows of x pass. */
INLINE long blocks_of(long rows, long row_bytes) {
  return (rows * row_bytes + X_BLOCK_BYTES - 1) / X_BLOCK_BYTES;
}

#define STREAMING_ROWS 64 /* up to here reading w is what takes the time */

INLINE int is_gated(const linear_job *job) {
  return job->kind == KUN_SWIGLU || job->kind == KUN_GEGLU;
}

/* Columns of y that one panel yields: a gated panel is 8 gate rows over 8 up rows. */
INLINE long panel_columns(const linear_job *job) { return is_gated(job) ? 8 : PANEL; }

/* The rows of w of a panel that are plain; in the place of those that are missing, the last one. */
INLINE void plain_rows(const char **rows, const linear_job *job, long column) {
  long row_bytes = job->k * (long)sizeof(elem), columns = panel_columns(job);
  long before = job->panels * columns, n = job->n - before;
  const char *w = (const char *)job->w + job->panels * PANEL * row_bytes;
  for (int r = 0; r < PANEL; r++) {
    long at = column - before + r % columns;
    if (at > n - 1) at = n - 1;
    rows[r] = w + (at + (r / columns) * n) * row_bytes;
  }
}

/* Where a panel lies, if it is one. */
INLINE const char *panel_at(const linear_job *job, long panel) {
  return (const char *)job->w + panel * PANEL * job->k * (long)sizeof(elem);
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

#if PIECE < LANES
/* Round, activate and store 4 gated rows at most: a row's gates are one piece and its ups the other. */
INLINE void finish_few(const linear_job *job, vf *sums, vf bias, long row, const int rows,
                       long column) {
  long left = job->n - column < 8 ? job->n - column : 8;
  pf gate[4], up[4];
  UNROLL for (int i = 0; i < rows; i++) {
    gate[i] = piece_rounded(*piece_of(sums + i, 0) + *piece_of(&bias, 0));
    up[i] = piece_rounded(*piece_of(sums + i, 1) + *piece_of(&bias, 1));
  }
  if (job->kind == KUN_GEGLU) gelu_all(gate, rows);
  else silu_all(gate, rows);
  elem *y = (elem *)job->y + row * job->n + column;
  UNROLL for (int i = 0; i < rows; i++) {
    store_piece(y + i * job->n, piece_rounded(gate[i]) * up[i], (int)left);
  }
}

static void finish_gated(const linear_job *job, vf *sums, vf bias, long row, int rows,
                         long column) {
  for (; rows >= 4; rows -= 4, row += 4, sums += 4) finish_few(job, sums, bias, row, 4, column);
  if (rows == 3) finish_few(job, sums, bias, row, 3, column);
  else if (rows == 2) finish_few(job, sums, bias, row, 2, column);
  else if (rows == 1) finish_few(job, sums, bias, row, 1, column);
}
#else
/* Round, activate and store some gated rows, at most 2 `pairs`: two rows fill a vector. */
INLINE void finish_pairs(const linear_job *job, const vf *sums, vf bias, long row, const int pairs,
                         int rows, long column) {
  long left = job->n - column < 8 ? job->n - column : 8;
  vf gate[4], up[4];
  UNROLL for (int i = 0; i < pairs; i++) {
    int second = 2 * i + 1 < rows ? 2 * i + 1 : 2 * i;
    vf a = rounded(sums[2 * i] + bias), b = rounded(sums[second] + bias);
    gate[i] = join_low(a, b);
    up[i] = join_high(a, b);
  }
  if (job->kind == KUN_GEGLU) gelu_all(gate, pairs);
  else silu_all(gate, pairs);
  elem *y = (elem *)job->y + row * job->n + column;
  UNROLL for (int i = 0; i < pairs; i++) {
    elem both[LANES];
    store(both, rounded(gate[i]) * up[i]);
    for (int r = 0; r < 2 && 2 * i + r < rows; r++, y += job->n) {
      if (left == 8) memcpy(y, both + r * 8, 8 * sizeof(elem));
      else memcpy(y, both + r * 8, (size_t)left * sizeof(elem));
    }
  }
}

static void finish_gated(const linear_job *job, vf *sums, vf bias, long row, int rows,
                         long column) {
  for (; rows > 6; rows -= 8, row += 8, sums += 8) {
    finish_pairs(job, sums, bias, row, 4, rows < 8 ? rows : 8, column);
  }
  if (rows > 4) finish_pairs(job, sums, bias, row, 3, rows, column);
  else if (rows > 2) finish_pairs(job, sums, bias, row, 2, rows, column);
  else if (rows > 0) finish_pairs(job, sums, bias, row, 1, rows, column);
}
#endif

/* Round and store the rows of one tile. */
INLINE void finish(const linear_job *job, vf *tile_out, vf bias, long row, int rows,
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

#ifdef AMX_PRODUCTS
static void amx_pass(const linear_job *job, const char *panel, long column, long first, long end,
                     const char *next);
#endif

/* The passes over a panel, apart from those of gate and up: in one function compilers write slower
 * code for both. */
static __attribute__((noinline)) void plain_passes(const linear_job *job, const char *panel,
                                                   long column, const char *x, long first, long end,
                                                   const char *next) {
  vf out[PASS_ROWS], bias = panel_bias(job, column);
  long count = end - first, x_stride = job->k * (long)sizeof(factor);
  int passes = passes_of(count);
  for (int pass = 0; pass < passes; pass++) {
    long row = first + count * pass / passes, after = first + count * (pass + 1) / passes;
    panel_tile(pass, passes, (int)(after - row), out, panel, x + (row - first) * x_stride, x_stride,
               job->k * (long)sizeof(elem), next);
    finish(job, out, bias, row, (int)(after - row), column);
  }
}

#define HELD_SUMS 8 /* gated rows whose sums wait to be activated together */

/* The passes over a panel of gate and up. An activation is a chain of operations: eight rows side by
 * side wait for it once, where products would wait after each pass. */
static __attribute__((noinline)) void gated_passes(const linear_job *job, const char *panel,
                                                   long column, const char *x, long first, long end,
                                                   const char *next) {
  vf sums[HELD_SUMS + PASS_ROWS], bias = panel_bias(job, column);
  long count = end - first, x_stride = job->k * (long)sizeof(factor), done = first;
  int passes = passes_of(count);
  for (int pass = 0; pass < passes; pass++) {
    long row = first + count * pass / passes, after = first + count * (pass + 1) / passes;
    panel_tile(pass, passes, (int)(after - row), sums + (row - done), panel,
               x + (row - first) * x_stride, x_stride, job->k * (long)sizeof(elem), next);
    if (after - done < HELD_SUMS && after < end) continue;
    finish_gated(job, sums, bias, done, (int)(after - done), column);
    done = after;
  }
}

/* One panel of columns for rows [first, end) of x, whose factors are at `x`, while fetching `next`,
 * the one after it. Plain rows become a panel in `scratch`. */
static void panel_pass(const linear_job *job, char *scratch, long panel, const char *x, long first,
                       long end, const char *next) {
  const char *at = panel_at(job, panel);
  long row_bytes = job->k * (long)sizeof(elem), column = panel * panel_columns(job);
  if (panel >= job->panels) {
    const char *rows[PANEL];
    plain_rows(rows, job, column);
    make_panel(scratch, rows, row_bytes);
    at = scratch;
  }
#ifdef AMX_PRODUCTS /* whatever the number of rows: see amx_linear.h */
  amx_pass(job, at, column, first, end, next);
  return;
#endif
  if (is_gated(job)) gated_passes(job, at, column, x, first, end, next);
  else plain_passes(job, at, column, x, first, end, next);
}

/* Where the rows of a block begin. */
INLINE long row_of_block(const linear_job *job, long block) {
  return job->m * block / blocks_of(job->m, job->k * (long)sizeof(factor));
}

/* Blocks [start, stop) of rows. Their factors begin at `ready`, or each thread makes them. */
static void linear_blocks(const linear_job *job, int thread, long start, long stop,
                          const char *ready) {
  long row_bytes = job->k * (long)sizeof(elem), columns = panel_columns(job);
  long panels = (job->n + columns - 1) / columns, row_blocks = stop - start;
  /* Long runs of panels keep memory streaming; short ones share compute evenly with whoever else
   * wants the cores. */
  long chunk = job->m > STREAMING_ROWS ? 1 : panels / (kun_threads() * 10) + 1;
  long chunks = (panels + chunk - 1) / chunk, pieces = chunks * row_blocks;
  long most_rows = (job->m + stop - 1) / stop; /* of a block, if not `ready` */
  size_t widened = ready ? 0 : factor_bytes(most_rows * job->k);
  char *scratch = pool_scratch(thread, (size_t)(row_bytes * PANEL) + widened);
  const char *x = NULL;
  long now = -1, first = 0, end = 0; /* the block of rows whose factors are at x */
  for (long piece = pool_take(), following; piece < pieces; piece = following) {
    long block = start + piece / chunks, from = piece % chunks * chunk;
    long to = from + chunk < panels ? from + chunk : panels;
    following = pool_take(); /* already now: its first panel is fetched with this one's last */
    if (block != now) {
      now = block;
      first = row_of_block(job, block);
      end = row_of_block(job, block + 1);
      x = ready;
      if (x != NULL) x += (first - row_of_block(job, start)) * job->k * (long)sizeof(factor);
      else x = factors_of(scratch + row_bytes * PANEL, job->x + first * job->k, end - first, job->k);
    }
    for (long panel = from; panel < to; panel++) {
      long next = panel + 1 < to ? panel + 1 : following % chunks * chunk;
      panel_pass(job, scratch, panel, x, first, end, panel_at(job, next));
    }
  }
}

#ifdef ORDERS_X
#define OWN_FACTORS 128 /* rows times threads: up to here each makes all, sooner than they meet */

static void make_factor_room(void *bytes) { pool_shared(POOL_FACTORS, *(size_t *)bytes); }

/* The same in rounds: all threads make the factors of a block for each of them, and then multiply. */
static void linear_in_rounds(const linear_job *job, int thread, long row_blocks) {
  for (long from = 0; from < row_blocks; from += kun_threads()) {
    long to = from + kun_threads() < row_blocks ? from + kun_threads() : row_blocks;
    long start = row_of_block(job, from), rows = row_of_block(job, to) - start;
    size_t bytes = factor_bytes(rows * job->k);
    pool_barrier_around(make_factor_room, &bytes);
    char *factors = pool_shared(POOL_FACTORS, bytes);
    long passes = passes_of((job->m + row_blocks - 1) / row_blocks); /* of the largest block */
    for (long piece = pool_take(); piece < (to - from) * passes; piece = pool_take()) {
      long block = from + piece / passes, pass = piece % passes;
      long first = row_of_block(job, block), count = row_of_block(job, block + 1) - first;
      char *at = factors + (first - start) * job->k * (long)sizeof(factor);
      if (pass < passes_of(count)) {
        put_pass(at, job->x + first * job->k, NULL, count, job->k, (int)pass);
      }
    }
    pool_barrier();
    linear_blocks(job, thread, from, to, factors);
  }
}
#endif

/* Run inside a pool job; the caller puts a barrier before and after. */
static void linear_part(const linear_job *job, int thread) {
  long row_blocks = blocks_of(job->m, job->k * (long)sizeof(factor));
#ifdef ORDERS_X
  if (kun_threads() > 1 && job->m * kun_threads() > OWN_FACTORS) {
    linear_in_rounds(job, thread, row_blocks);
    return;
  }
#endif
  linear_blocks(job, thread, 0, row_blocks, NULL);
}

static void linear_job_fn(void *arg, int thread) { linear_part(arg, thread); }

/* A whole product as one call. k must be a multiple of 16 bytes' worth of elements. */
void NAME(kun_linear)(const elem *x, const elem *w, const elem *bias, void *y, int64_t m,
                      int64_t n, int64_t k, int32_t kind) {
  linear_job job = {x, w, bias, y, m, n, k, kind};
  if (m > 0) pool_run(linear_job_fn, &job);
}

/* The same where w begins with so many panels. */
void NAME(kun_panel_linear)(const elem *x, const elem *w, const elem *bias, void *y, int64_t m,
                            int64_t n, int64_t k, int32_t kind, int64_t panels) {
  linear_job job = {x, w, bias, y, m, n, k, kind, .panels = panels};
  if (m > 0) pool_run(linear_job_fn, &job);
}
