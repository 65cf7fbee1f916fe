/* Rows of x against a panel of 16 rows of w, by AMX. Needs linear.h; of bfloat16 only.
 *
 * A is 16 rows of x as they lie, 32 columns of them; B the same columns of the panel as [pair of
 * columns][row of w][2 columns]; C [row of x][row of w] in float32. One instruction sums the
 * products of the even columns in their order, from 0, and so those of the odd ones; then it adds
 * both, and their sum to C. So an output is the same bits whatever other rows the tiles hold. But
 * vdpbf16ps adds each product to the sum itself, and no packing makes the one give the other's
 * bits. Hence here every product of bfloat16 matrices goes through tiles, a single row's too: a
 * lower tile takes less time, and a lone row waits for memory in any case. */
#include "amx.h"

#define AMX_TILES 4 /* of rows whose sums are kept at once */
#define AMX_TILE_BYTES (AMX_HEIGHT * AMX_ROW_BYTES)

/* What a pass has in scratch, where columns end before the last step does: zeros behind them. */
typedef struct {
  char *w; /* one tile B */
  char *x; /* [AMX_TILES] tiles A */
} amx_ends;

/* Tiles A over rows [row, end): of `height` rows each, which begin at `x`. Where rows do not fill the
 * last tile, it has some of the tile before once more: the same bits, of which only the new ones
 * are used. */
typedef struct {
  int tiles;
  long starts[AMX_TILES];
  const char *x[AMX_TILES];
} amx_rows;

INLINE amx_rows amx_rows_from(long row, long end, int height, const char *x, long row_bytes) {
  amx_rows of = {0};
  for (; of.tiles < AMX_TILES && row + of.tiles * AMX_HEIGHT < end; of.tiles++) {
    long start = row + of.tiles * AMX_HEIGHT;
    of.starts[of.tiles] = start < end - height ? start : end - height;
    of.x[of.tiles] = x + of.starts[of.tiles] * row_bytes;
  }
  return of;
}

INLINE int amx_height(long rows) { return rows < AMX_HEIGHT ? (int)rows : AMX_HEIGHT; }

/* Rows of tile t that an earlier one has. */
INLINE int amx_skipped(const amx_rows *of, int t, long row) {
  return (int)(row + t * AMX_HEIGHT - of->starts[t]);
}

INLINE void amx_zero(void) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

/* The sums of tile t to out[16 t ...]. */
INLINE void amx_store(int tiles, vf *out) {
  _tile_stored(0, out, AMX_ROW_BYTES);
  if (tiles > 1) _tile_stored(1, out + AMX_HEIGHT, AMX_ROW_BYTES);
  if (tiles > 2) _tile_stored(2, out + 2 * AMX_HEIGHT, AMX_ROW_BYTES);
  if (tiles > 3) _tile_stored(3, out + 3 * AMX_HEIGHT, AMX_ROW_BYTES);
}

/* One step of up to AMX_TILES tiles of rows, which begin at `x`, with the B at `w`. */
INLINE void amx_step(int tiles, const char *w, long w_stride, const char *const *x, long at,
                     long stride) {
  AMX_LOAD(AMX_PANEL_TILE, w, w_stride);
  AMX_LOAD(5, x[0] + at, stride);
  _tile_dpbf16ps(0, 5, AMX_PANEL_TILE);
  if (tiles > 1) {
    AMX_LOAD(6, x[1] + at, stride);
    _tile_dpbf16ps(1, 6, AMX_PANEL_TILE);
  }
  if (tiles > 2) {
    AMX_LOAD(5, x[2] + at, stride);
    _tile_dpbf16ps(2, 5, AMX_PANEL_TILE);
  }
  if (tiles > 3) {
    AMX_LOAD(6, x[3] + at, stride);
    _tile_dpbf16ps(3, 6, AMX_PANEL_TILE);
  }
}

/* out[16 t + i] = the 16 dot products of row i of tile t, whose first row is at x[t], with the panel
 * at `panel`, whose steps are tiles B as they lie. Tiles are `height` rows high. Fetches
 * `next`, unless it is NULL. */
static void amx_multiply(int tiles, int height, vf *out, const char *panel, const amx_ends *ends,
                         const char *const *x, long row_bytes, const char *next) {
  long at = 0;
  amx_shape(height);
  amx_zero();
  for (; at + AMX_ROW_BYTES <= row_bytes; at += AMX_ROW_BYTES) {
    for (int line = 0; line < AMX_HEIGHT && next != NULL; line++) {
      __builtin_prefetch(next + at * PANEL + line * AMX_ROW_BYTES, 0, 2);
    }
    amx_step(tiles, panel + at * PANEL, AMX_ROW_BYTES, x, at, row_bytes);
  }
  if (at < row_bytes) {
    const char *last[AMX_TILES];
    size_t left = (size_t)(row_bytes - at);
    memset(ends->x, 0, (size_t)tiles * AMX_TILE_BYTES);
    for (int t = 0; t < tiles; t++) {
      char *end = ends->x + t * AMX_TILE_BYTES;
      for (int i = 0; i < height; i++) {
        memcpy(end + i * AMX_ROW_BYTES, x[t] + i * row_bytes + at, left);
      }
      last[t] = end;
    }
    amx_step(tiles, ends->w, AMX_ROW_BYTES, last, 0, AMX_ROW_BYTES);
  }
  amx_store(tiles, out);
}

/* One panel of columns for rows [first, end) of x, while fetching the panel after it. */
static __attribute__((noinline)) void amx_pass(const linear_job *job, const char *panel,
                                               long column, long first, long end,
                                               const char *next) {
  vf out[AMX_TILES * AMX_HEIGHT];
  long row_bytes = job->k * (long)sizeof(elem), whole = row_bytes / AMX_ROW_BYTES * AMX_ROW_BYTES;
  char *scratch = amx_scratch((AMX_TILES + 1) * AMX_TILE_BYTES);
  amx_ends ends = {scratch, scratch + AMX_TILE_BYTES};
  int height = amx_height(end - first);
  vf bias = panel_bias(job, column);
  if (whole < row_bytes) {
    size_t left = (size_t)(row_bytes - whole) * PANEL;
    memcpy(ends.w, panel + whole * PANEL, left);
    memset(ends.w + left, 0, AMX_TILE_BYTES - left);
  }
  for (long row = first; row < end; row += AMX_TILES * AMX_HEIGHT) {
    amx_rows of = amx_rows_from(row, end, height, (const char *)job->x, row_bytes);
    amx_multiply(of.tiles, height, out, panel, &ends, of.x, row_bytes, row == first ? next : NULL);
    for (int t = 0; t < of.tiles; t++) {
      int skipped = amx_skipped(&of, t, row);
      finish(job, out + t * AMX_HEIGHT + skipped, bias, of.starts[t] + skipped, height - skipped,
             column);
    }
  }
}
