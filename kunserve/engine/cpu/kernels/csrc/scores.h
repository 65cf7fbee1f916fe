/* Scores of queries for a span of keys: many rows by tile.h, a few by spread.h, and all by
 * amx_attention.h where there is AMX. */

#ifdef AMX_PRODUCTS
static void amx_score_panel(attention_buffers *b, const char *panel, float *scores, long first,
                            long rows, long row_bytes, float scale, fetched_pair next);
#else
/* Scores of rows [first, rows) of a kv head for the keys of one panel. */
static void score_panel(attention_buffers *b, const char *panel, float *scores, long first,
                        long rows, long row_bytes, float scale, const char *next) {
  const char *each[PANEL];
#if PIECE < LANES
  const long height = PASS_ROWS, x_stride = row_bytes / (long)sizeof(elem) * (long)sizeof(factor);
  vf out[PASS_ROWS];
  UNROLL for (int r = 0; r < PANEL; r++) each[r] = panel + r * row_bytes;
  make_panel(b->keys, each, row_bytes);
  for (long at = 0; at < PANEL * row_bytes; at += 64) __builtin_prefetch(next + at, 0, 2);
#else
  const long height = TILE_ROWS;
  vf out[TILE_ROWS] = {{0}};
  const char *fetched[PANEL];
  UNROLL for (int r = 0; r < PANEL; r++) {
    each[r] = panel + r * row_bytes;
    fetched[r] = next + r * row_bytes;
  }
  pack_panel(b->keys, each, row_bytes, fetched);
#endif
  for (long row = first; row < rows; row += height) {
    int count = (int)(rows - row < height ? rows - row : height);
#if PIECE < LANES
    pass_of_rows(count, out, b->keys, b->spread + row * x_stride, x_stride, row_bytes / 16, NULL);
#else
    tile(count, out, b->keys, (const char *)b->q + row * row_bytes, row_bytes, row_bytes / 16);
#endif
    for (int r = 0; r < count; r++) store_f32(scores + (row + r) * SPAN, out[r] * scale);
  }
}

#endif

/* Scores of a kv head's rows for `count` keys from `from` on, multiplied by `scale`. Those of rows
 * that see none of a panel's keys are not written. */
static void score_span(const attention_job *job, const attention_piece *piece,
                       attention_buffers *b, const span_rows *keys, fetch_list *list, long from,
                       long count) {
  long group = job->model->heads / job->model->kv_heads, rows = piece->queries * group;
  long row_bytes = job->model->head_dim * (long)sizeof(elem);
  float scale = job->model->score_scale;
  if (scale == 0.0f) scale = 1.0f / __builtin_sqrtf((float)job->model->head_dim);
  for (long i = 0; i < count; i += PANEL) {
    const char *panel = keys->panels[i / PANEL];
    fetched_pair next = next_fetched(list, panel);
    long first = first_seeing(piece, group, from + i);
#ifdef AMX_PRODUCTS
    amx_score_panel(b, panel, b->scores + i, first, rows, row_bytes, scale, next);
#else
    if (rows <= SPREAD_ROWS) {
      spread_dots((int)rows, b->scores + i, panel, b->spread, row_bytes, scale, next);
    } else {
      score_panel(b, panel, b->scores + i, first, rows, row_bytes, scale, next.far);
    }
#endif
  }
}
