/* Work on single rows: norms, rotary positions, and writing K and V into the paged cache. */

/* y = w * round(x / rms(x)), rounded where Hugging Face rounds. y may be x. */
INLINE void norm_row(elem *y, const elem *x, const elem *w, long n, float eps) {
  vf squares = {};
  for (long i = 0; i < n; i += LANES) {
    vf v = load_some(x + i, (int)(n - i));
    squares = dot_f32(squares, (vi)v, (vi)v);
  }
  vf scale = splat(1.0f / __builtin_sqrtf(sum_lanes(squares) / (float)n + eps));
  for (long i = 0; i < n; i += LANES) {
    int left = (int)(n - i);
    vf v = rounded(load_some(x + i, left) * scale);
    store_some(y + i, v * load_some(w + i, left), left);
  }
}

static void norm_part(elem *y, const elem *x, const elem *w, long rows, long n, float eps,
                      int thread) {
  long end = rows * (thread + 1) / kun_threads();
  for (long r = rows * thread / kun_threads(); r < end; r++) norm_row(y + r * n, x + r * n, w, n, eps);
}

/* Rotate one head in place; `rope` is this position's [cos | sin], head_dim / 2 floats each. */
INLINE void rotate_head(elem *x, const float *rope, long head_dim) {
  long half = head_dim / 2;
  for (long i = 0; i < half; i += LANES) {
    vf c = load_f32(rope + i), s = load_f32(rope + half + i);
    vf low = load(x + i), high = load(x + half + i);
    store(x + i, dot_f32(low * c, (vi)-high, (vi)s));
    store(x + half + i, dot_f32(high * c, (vi)low, (vi)s));
  }
}

/* Where K of (entry's block, layer, kv head 0) starts; V follows one half unit later. */
INLINE elem *unit_at(const kun_model *model, long layer, long entry) {
  return (elem *)(model->kv + (entry + layer) * model->unit_bytes);
}

/* Normalise (if the model does), rotate and cache one token's fused q, k and v. */
INLINE void place_token(const kun_model *model, const kun_layer *weights, long layer, elem *qkv,
                        const float *rope, long entry, long slot) {
  long dim = model->head_dim, heads = model->heads, kv_heads = model->kv_heads;
  if (model->whole_qk_norm) {
    elem *k = qkv + heads * dim;
    norm_row(qkv, qkv, weights->q_norm, heads * dim, model->eps);
    norm_row(k, k, weights->k_norm, kv_heads * dim, model->eps);
  }
  for (long h = 0; h < heads + kv_heads; h++) {
    const elem *norm = h < heads ? weights->q_norm : weights->k_norm;
    if (norm != NULL && !model->whole_qk_norm) norm_row(qkv + h * dim, qkv + h * dim, norm, dim, model->eps);
    rotate_head(qkv + h * dim, rope, dim);
  }
  elem *unit = unit_at(model, layer, entry);
  for (long h = 0; h < 2 * kv_heads; h++) {
    elem *row = unit + (h * model->block_size + slot) * dim;
    memcpy(row, qkv + (heads + h) * dim, (size_t)dim * sizeof(elem));
  }
}

/* `place_token` for this thread's share of the step. */
static void place_part(const kun_model *model, const kun_layer *weights, long layer,
                       const kun_batch *batch, elem *qkv, int thread) {
  long stride = (model->heads + 2 * model->kv_heads) * (long)model->head_dim;
  long first = (long)batch->num_tokens * thread / kun_threads();
  long end = (long)batch->num_tokens * (thread + 1) / kun_threads();
  for (long s = 0; s < batch->num_seqs; s++) {
    long from = batch->q_starts[s], to = batch->q_starts[s + 1];
    const int32_t *table = batch->tables + (long)batch->rows[s] * batch->max_blocks;
    for (long t = from > first ? from : first; t < to && t < end; t++) {
      long position = batch->context_lens[s] - to + t;
      const float *rope = batch->rope + (long)batch->positions[t] * model->head_dim;
      place_token(model, weights, layer, qkv + t * stride, rope,
                  table[position / model->block_size], position % model->block_size);
    }
  }
}
