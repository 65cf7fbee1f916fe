/* y = x w^T with w in packed panels (panels.h). Needs typed.h and linear.h. */
#include "rounding.h"

#ifdef KUN_AMX
#define MOST_PACKED_ROWS AMX_HEIGHT
#else
#define MOST_PACKED_ROWS PACKED_ROWS
#endif
#define OWN_ROWS 4 /* up to here every thread rounds x for itself: quicker than to meet */

typedef struct {
  linear_job out; /* all but its w */
  const char *w;
  int formats[KUN_RUNS];
  long ends[KUN_RUNS]; /* in panels */
  x_block *x;          /* [m][k / 32] */
} packed_job;

/* One panel of columns for rows [first, end) of x. */
static void packed_pass(const packed_job *job, const x_block *x, long panel, long first,
                        long end) {
  const char *at = job->w;
  long blocks = job->out.k / BLOCK, before = 0, column = panel * panel_columns(&job->out);
  int run = 0;
  for (; panel >= job->ends[run]; before = job->ends[run++]) {
    at += (job->ends[run] - before) * panel_bytes(job->formats[run], blocks);
  }
  at += (panel - before) * panel_bytes(job->formats[run], blocks);
  vf bias = panel_bias(&job->out, column), out[MOST_PACKED_ROWS];
#ifdef KUN_AMX
  for (long row = first; row < end && end - first >= AMX_HEIGHT; row += AMX_HEIGHT) {
    long start = row < end - AMX_HEIGHT ? row : end - AMX_HEIGHT, skipped = row - start;
    packed_tile_by_amx(job->formats[run], out, at, x + start * blocks, blocks, blocks, row == first);
    finish(&job->out, out + skipped, bias, row, (int)(AMX_HEIGHT - skipped), column);
  }
  if (end - first >= AMX_HEIGHT) return;
#endif
  long tiles = (end - first + PACKED_ROWS - 1) / PACKED_ROWS, row = first;
  for (; tiles > 0; tiles--) { /* nearly alike in height */
    int rows = (int)((end - row) / tiles);
    packed_tile(job->formats[run], rows, out, at, x + row * blocks, blocks, blocks, row == first);
    finish(&job->out, out, bias, row, rows, column);
    row += rows;
  }
}

/* Run inside a pool job; the caller puts a barrier before and after. */
static void packed_part(const packed_job *job, int thread) {
  long m = job->out.m, blocks = job->out.k / BLOCK, columns = panel_columns(&job->out);
  x_block *x = job->x;
  if (m <= OWN_ROWS) {
    x = pool_scratch(thread, (size_t)(m * blocks) * sizeof(x_block));
    round_blocks(x, job->out.x, 0, m * blocks);
  } else {
    long threads = kun_threads();
    round_blocks(x, job->out.x, m * blocks * thread / threads, m * blocks * (thread + 1) / threads);
    pool_barrier();
  }
  long panels = (job->out.n + columns - 1) / columns;
  long row_blocks = (m * blocks * (long)sizeof(x_block) + X_BLOCK_BYTES - 1) / X_BLOCK_BYTES;
  long chunk = m > STREAMING_ROWS ? 2 : panels / (kun_threads() * 6) + 1;
  long chunks = (panels + chunk - 1) / chunk;
  for (long piece = pool_take(); piece < chunks * row_blocks; piece = pool_take()) {
    long block = piece / chunks, from = piece % chunks * chunk;
    long to = from + chunk < panels ? from + chunk : panels;
    for (long panel = from; panel < to; panel++) {
      packed_pass(job, x, panel, m * block / row_blocks, m * (block + 1) / row_blocks);
    }
  }
}

/* A product whose weights are in the elements' type, or packed where their first format says so. */
INLINE packed_job packed_of(linear_job out, const int32_t *formats, const long *rows, int runs,
                            void *x_blocks) {
  packed_job job = {.out = out, .w = (const char *)out.w, .x = x_blocks};
  long columns = panel_columns(&out), end = 0;
  for (int i = 0; i < KUN_RUNS; i++) {
    if (i < runs) end += (rows[i] + columns - 1) / columns;
    job.formats[i] = i < runs ? formats[i] : 0;
    job.ends[i] = end;
  }
  if (formats[0] == KUN_PANELS) job.out.panels = out.n / columns;
  return job;
}

/* Whether weights are in the elements' type. */
INLINE int is_exact(int format) { return format == KUN_PLAIN || format == KUN_PANELS; }

INLINE void any_part(const packed_job *job, int thread) {
  if (is_exact(job->formats[0])) linear_part(&job->out, thread);
  else packed_part(job, thread);
}

static void packed_job_fn(void *arg, int thread) { packed_part(arg, thread); }

/* As kun_linear, of packed weights; x_blocks has 64 bytes for each 32 elements of x. */
void NAME(kun_packed_linear)(const elem *x, const kun_packed *w, const elem *bias, void *y,
                             int64_t m, int64_t n, int64_t k, int32_t kind, void *x_blocks) {
  linear_job out = {x, w->panels, bias, y, m, n, k, kind};
  long rows[KUN_RUNS];
  for (int i = 0; i < KUN_RUNS; i++) rows[i] = i < w->runs ? w->rows[i] : 0;
  packed_job job = packed_of(out, w->formats, rows, w->runs, x_blocks);
  if (m > 0) pool_run(packed_job_fn, &job);
}

typedef struct {
  const kun_packed *w;
  const int64_t *which;
  elem *y;
  long m, k;
} gather_job;

static void gather_fn(void *arg, int thread) {
  const gather_job *job = arg;
  long blocks = job->k / BLOCK;
  float *values = pool_scratch(thread, (size_t)job->k * sizeof *values);
  for (long i = pool_take(); i < job->m; i = pool_take()) {
    const char *panel = job->w->panels;
    long row = job->which[i];
    panel += row / PANEL * panel_bytes(job->w->formats[0], blocks);
    unpack_row(job->w->formats[0], values, panel, (int)(row % PANEL), blocks);
    for (long at = 0; at < job->k; at += LANES) {
      store(job->y + i * job->k + at, load_f32(values + at));
    }
  }
}

/* Rows of a packed matrix of one run: y is [m][k]. */
void NAME(kun_gather)(const kun_packed *w, const int64_t *which, elem *y, int64_t m, int64_t k) {
  gather_job job = {w, which, y, m, k};
  if (m > 0) pool_run(gather_fn, &job);
}
