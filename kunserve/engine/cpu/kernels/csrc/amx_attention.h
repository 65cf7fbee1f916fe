/* Attention's products by AMX, whatever the number of rows: see amx_linear.h, which this needs beside
 * blend.h. A lone query goes through tiles too, because its bits must not tell. */

/* Scores of rows [first, rows) of a kv head for the keys of one panel, which becomes tiles B. */
static void amx_score_panel(attention_buffers *b, const char *panel, float *scores, long first,
                            long rows, long row_bytes, float scale, fetched_pair next) {
  const char *each[PANEL];
  vf out[AMX_TILES * AMX_HEIGHT];
  int height = amx_height(rows - first);
  UNROLL for (int r = 0; r < PANEL; r++) each[r] = panel + r * row_bytes;
  for (long at = 0; at < row_bytes; at += AMX_ROW_BYTES) {
    fetch_lines(next, at * PANEL, PANEL);
    transpose_64_bytes(b->keys + at * PANEL, each, at, AMX_ROW_BYTES);
  }
  for (long row = first; row < rows; row += AMX_TILES * AMX_HEIGHT) {
    amx_rows of = amx_rows_from(row, rows, height, (const char *)b->q, row_bytes);
    amx_multiply(of.tiles, height, out, b->keys, NULL, of.x, row_bytes, NULL);
    for (int t = 0; t < of.tiles; t++) {
      float *to = scores + of.starts[t] * SPAN;
      for (int i = 0; i < height; i++, to += SPAN) store_f32(to, out[t * AMX_HEIGHT + i] * scale);
    }
  }
}

/* acc = acc * rescale + weights x V for rows [first, rows) of a kv head and `count` values from
 * position `from` on. The values become tiles B, with zeros where they end before a step does; so do
 * the weights. */
static void amx_blend_span(attention_buffers *b, const attention_piece *piece, long group,
                           const span_rows *values, const fetched_pair *next, long first, long rows,
                           long dim, long from, long count) {
  vf out[AMX_TILES * AMX_HEIGHT];
  const long stride = SPAN * (long)sizeof(weight), step_keys = AMX_ROW_BYTES / (long)sizeof(weight);
  const long key_bytes = dim * 4 / KEYS_PER_STEP;
  int height = amx_height(rows - first);
  pack_values(b->values, values, next, dim, count);
  if (count % step_keys) memset(b->values + count * key_bytes, 0, (size_t)(PANEL * key_bytes));
  amx_shape(height);
  for (long row = first; row < rows; row += AMX_TILES * AMX_HEIGHT) {
    amx_rows of = amx_rows_from(row, rows, height, (const char *)b->weights, stride);
    long last = of.starts[of.tiles - 1] + height - 1;
    long seen = keys_seen(piece, group, last, from, count);
    for (long d = 0; d < dim; d += LANES) {
      amx_zero();
      for (long key = 0; key < seen; key += step_keys) {
        const char *v = b->values + key * key_bytes + d * 4;
        amx_step(of.tiles, v, dim * 4, of.x, key * (long)sizeof(weight), stride);
      }
      amx_store(of.tiles, out);
      for (int t = 0; t < of.tiles; t++) {
        for (int i = amx_skipped(&of, t, row); i < height; i++) {
          float *sum = b->seen.acc + (of.starts[t] + i) * dim + d;
          vf past = load_f32(sum) * splat(b->rescale[of.starts[t] + i]);
          store_f32(sum, past + out[t * AMX_HEIGHT + i]);
        }
      }
    }
  }
}
