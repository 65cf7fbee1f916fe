/* Rows of x against a panel of 16 rows of w, by AMX. Needs tile.h and linear.h; of bfloat16 only.
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

/* What a pass has in scratch: the panel, and rows of x where they end before the last step does. */
typedef struct {
  char *w;    /* [step] tiles B */
  char *tail; /* [AMX_TILES] tiles A, with zeros behind the last columns */
} amx_buffers;

/* 64 bytes of each of the panel's rows, or the `left` that there are, as B. */
INLINE void amx_pack_step(char *packed, const char *const *rows, long at, long left) {
  vi quads[4][4];
  UNROLL for (int q = 0; q < 4; q++) {
    quad_steps(quads[q], rows[q] + at, rows[4 + q] + at, rows[8 + q] + at, rows[12 + q] + at, left);
  }
  UNROLL for (int s = 0; s < 4; s++, packed += 4 * AMX_ROW_BYTES) {
    vi a = quads[0][s], b = quads[1][s], c = quads[2][s], d = quads[3][s];
    vi ab01 = SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    vi ab23 = SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    vi cd01 = SHUFFLE(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    vi cd23 = SHUFFLE(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
#define LOWER(u, v) SHUFFLE(u, v, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define UPPER(u, v) SHUFFLE(u, v, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
    *(vi_u *)packed = LOWER(ab01, cd01);
    *(vi_u *)(packed + AMX_ROW_BYTES) = UPPER(ab01, cd01);
    *(vi_u *)(packed + 2 * AMX_ROW_BYTES) = LOWER(ab23, cd23);
    *(vi_u *)(packed + 3 * AMX_ROW_BYTES) = UPPER(ab23, cd23);
#undef LOWER
#undef UPPER
  }
}

/* All of it, while fetching the rows of the next panel. Behind the last column it has zeros. */
static void amx_pack(char *packed, const char *const *rows, long row_bytes,
                     const char *const *next) {
  for (long at = 0; at < row_bytes; at += AMX_ROW_BYTES) {
    UNROLL for (int r = 0; r < PANEL; r++) __builtin_prefetch(next[r] + at, 0, 2);
    amx_pack_step(packed + at * PANEL, rows, at, row_bytes - at);
  }
}

/* One step of up to AMX_TILES tiles of rows, which begin at `x`. */
INLINE void amx_step(int tiles, const char *w, const char *const *x, long at, long stride) {
  AMX_LOAD(AMX_PANEL_TILE, w, AMX_ROW_BYTES);
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
 * that was packed. Tiles are `height` rows high. */
static void amx_multiply(int tiles, int height, vf *out, const amx_buffers *buffers,
                         const char *const *x, long row_bytes) {
  long at = 0;
  amx_shape(height);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (; at + AMX_ROW_BYTES <= row_bytes; at += AMX_ROW_BYTES) {
    amx_step(tiles, buffers->w + at * PANEL, x, at, row_bytes);
  }
  if (at < row_bytes) {
    const char *ends[AMX_TILES];
    memset(buffers->tail, 0, (size_t)tiles * AMX_TILE_BYTES);
    for (int t = 0; t < tiles; t++) {
      char *end = buffers->tail + t * AMX_TILE_BYTES;
      for (int i = 0; i < height; i++) {
        memcpy(end + i * AMX_ROW_BYTES, x[t] + i * row_bytes + at, (size_t)(row_bytes - at));
      }
      ends[t] = end;
    }
    amx_step(tiles, buffers->w + at * PANEL, ends, 0, AMX_ROW_BYTES);
  }
  _tile_stored(0, out, AMX_ROW_BYTES);
  if (tiles > 1) _tile_stored(1, out + AMX_HEIGHT, AMX_ROW_BYTES);
  if (tiles > 2) _tile_stored(2, out + 2 * AMX_HEIGHT, AMX_ROW_BYTES);
  if (tiles > 3) _tile_stored(3, out + 3 * AMX_HEIGHT, AMX_ROW_BYTES);
}

/* One panel of columns for rows [first, end) of x, while fetching the panel after it. Where rows do
 * not fill the last tile, it has some of the tile before once more: the same bits, of which only the
 * new ones are stored. */
static void amx_pass(const linear_job *job, long column, long first, long end) {
  vf out[AMX_TILES * AMX_HEIGHT];
  const char *rows[PANEL], *next[PANEL];
  long row_bytes = job->k * (long)sizeof(elem);
  long steps = (row_bytes + AMX_ROW_BYTES - 1) / AMX_ROW_BYTES;
  char *scratch = amx_scratch((size_t)(steps + AMX_TILES) * AMX_TILE_BYTES);
  amx_buffers buffers = {scratch, scratch + steps * AMX_TILE_BYTES};
  int height = end - first < AMX_HEIGHT ? (int)(end - first) : AMX_HEIGHT;
  vf bias = panel_bias(job, column);
  panel_rows(rows, job, column);
  panel_rows(next, job, column + panel_columns(job));
  amx_pack(buffers.w, rows, row_bytes, next);
  for (long row = first; row < end; row += AMX_TILES * AMX_HEIGHT) {
    long starts[AMX_TILES];
    const char *x[AMX_TILES];
    int tiles = 0;
    for (; tiles < AMX_TILES && row + tiles * AMX_HEIGHT < end; tiles++) {
      long start = row + tiles * AMX_HEIGHT;
      starts[tiles] = start < end - height ? start : end - height;
      x[tiles] = (const char *)(job->x + starts[tiles] * job->k);
    }
    amx_multiply(tiles, height, out, &buffers, x, row_bytes);
    for (int t = 0; t < tiles; t++) {
      int skipped = (int)(row + t * AMX_HEIGHT - starts[t]);
      finish(job, out + t * AMX_HEIGHT + skipped, bias, starts[t] + skipped, height - skipped,
             column);
    }
  }
}
