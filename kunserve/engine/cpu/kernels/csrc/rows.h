/* Work on single rows: norms, rotary positions, and writing K and V into the paged cache. */

INLINE float squares_of(const elem *x, long n) {
  vf squares = {};
  for (long i = 0; i < n; i += LANES) {
    vf v = load_some(x + i, (int)(n - i));
    squares = dot_f32(squares, (vi)v, (vi)v);
  }
  return sum_lanes(squares);
}

/* y = w * round(x / sqrt(mean + eps)), or y = (w + offset) * x / sqrt(mean + eps) where there is
 * one: rounded where Hugging Face rounds. y may be x. */
INLINE void norm_row_by(elem *y, const elem *x, const elem *w, long n, float mean, float eps,
                        int offset) {
  vf scale = splat(1.0f / __builtin_sqrtf(mean + eps));
  if (offset) {
    for (long i = 0; i < n; i += LANES) {
      int left = (int)(n - i);
      vf v = load_some(x + i, left) * scale;
      store_some(y + i, v * (load_some(w + i, left) + splat((float)offset)), left);
    }
    return;
  }
  for (long i = 0; i < n; i += LANES) {
    int left = (int)(n - i);
    vf v = rounded(load_some(x + i, left) * scale);
    store_some(y + i, v * load_some(w + i, left), left);
  }
}

/* The same by the row's own mean square. */
INLINE void norm_row(elem *y, const elem *x, const elem *w, long n, float eps, int offset) {
  norm_row_by(y, x, w, n, squares_of(x, n) / (float)n, eps, offset);
}

static void norm_part(elem *y, const elem *x, const elem *w, long rows, long n, float eps,
                      int offset, int thread) {
  long end = rows * (thread + 1) / kun_threads();
  for (long r = rows * thread / kun_threads(); r < end; r++) {
    norm_row(y + r * n, x + r * n, w, n, eps, offset);
  }
}

/* sum = sum + the norm of x, which x becomes: of the same rows as `norm_part`. */
static void add_norm_part(elem *sum, elem *x, const elem *w, long rows, long n, float eps,
                          int offset, int thread) {
  long first = rows * thread / kun_threads(), end = rows * (thread + 1) / kun_threads();
  norm_part(x, x, w, rows, n, eps, offset, thread);
  for (long i = first * n; i < end * n; i += LANES) {
    int left = (int)(end * n - i);
    store_some(sum + i, load_some(sum + i, left) + load_some(x + i, left), left);
  }
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

/* Where a rank leaves the sums of squares of each token's q and k. */
INLINE float *squares_at(const kun_ranks *ranks, long rank, long tokens, long token) {
  return (float *)ranks->parts + (rank * tokens + token) * 2;
}

/* Norms over all heads of q, and of k, of which each rank has some. A KV head that several ranks
 * have is counted as often as any other, so the mean is the same. */
INLINE void norm_whole(const kun_model *model, const kun_layer *weights, const kun_ranks *ranks,
                       long tokens, long token, elem *qkv) {
  long q_size = model->heads * model->head_dim, k_size = model->kv_heads * model->head_dim;
  elem *k = qkv + q_size;
  float q_mean, k_mean;
  if (ranks == NULL) {
    q_mean = squares_of(qkv, q_size) / (float)q_size;
    k_mean = squares_of(k, k_size) / (float)k_size;
  } else {
    float q_sum = 0.0f, k_sum = 0.0f;
    for (long r = 0; r < ranks->size; r++) {
      q_sum += squares_at(ranks, r, tokens, token)[0];
      k_sum += squares_at(ranks, r, tokens, token)[1];
    }
    q_mean = q_sum / (float)(q_size * ranks->size);
    k_mean = k_sum / (float)(k_size * ranks->size);
  }
  norm_row_by(qkv, qkv, weights->q_norm, q_size, q_mean, model->eps, model->norm_offset);
  norm_row_by(k, k, weights->k_norm, k_size, k_mean, model->eps, model->norm_offset);
}

/* What `norm_whole` needs of this rank, for this thread's share of the step. */
static void squares_part(const kun_model *model, long tokens, const elem *qkv,
                         const kun_ranks *ranks, int thread) {
  long q_size = model->heads * model->head_dim, k_size = model->kv_heads * model->head_dim;
  long end = tokens * (thread + 1) / kun_threads();
  for (long t = tokens * thread / kun_threads(); t < end; t++) {
    const elem *row = qkv + t * (q_size + 2 * k_size);
    float *squares = squares_at(ranks, ranks->rank, tokens, t);
    squares[0] = squares_of(row, q_size);
    squares[1] = squares_of(row + q_size, k_size);
  }
}

/* A token's K (half 0) or V (half 1) into its block. */
INLINE void cache_row(const kun_model *model, elem *unit, long half, long slot, const elem *row) {
  long dim = model->head_dim;
  for (long h = 0; h < model->kv_heads; h++) {
    elem *to = unit + ((half * model->kv_heads + h) * model->block_size + slot) * dim;
    memcpy(to, row + h * dim, (size_t)dim * sizeof(elem));
  }
}

/* Normalise each head (if the model does), rotate and cache one token's fused q, k and v. */
INLINE void place_token(const kun_model *model, const kun_layer *weights, long layer, elem *qkv,
                        const float *rope, long entry, long slot) {
  long dim = model->head_dim, heads = model->heads, kv_heads = model->kv_heads;
  for (long h = 0; h < heads + kv_heads; h++) {
    const elem *norm = h < heads ? weights->q_norm : weights->k_norm;
    if (norm != NULL && !model->whole_qk_norm) {
      norm_row(qkv + h * dim, qkv + h * dim, norm, dim, model->eps, model->norm_offset);
    }
    rotate_head(qkv + h * dim, rope, dim);
  }
  elem *unit = unit_at(model, layer, entry);
  cache_row(model, unit, 0, slot, qkv + heads * dim);
  cache_row(model, unit, 1, slot, qkv + (heads + kv_heads) * dim);
}

/* `place_token` for this thread's share of the step. */
static void place_part(const kun_model *model, const kun_layer *weights, long layer,
                       const kun_batch *batch, elem *qkv, const kun_ranks *ranks, int thread) {
  long stride = (model->heads + 2 * model->kv_heads) * (long)model->head_dim;
  long first = (long)batch->num_tokens * thread / kun_threads();
  long end = (long)batch->num_tokens * (thread + 1) / kun_threads();
  const float *turns = batch->rope[weights->rope];
  for (long s = 0; s < batch->num_seqs; s++) {
    long from = batch->q_starts[s], to = batch->q_starts[s + 1];
    const int32_t *table = batch->tables + (long)batch->rows[s] * batch->max_blocks;
    for (long t = from > first ? from : first; t < to && t < end; t++) {
      long position = batch->context_lens[s] - to + t;
      const float *rope = turns + (long)batch->positions[t] * model->head_dim;
      if (model->whole_qk_norm) {
        norm_whole(model, weights, ranks, batch->num_tokens, t, qkv + t * stride);
      }
      place_token(model, weights, layer, qkv + t * stride, rope,
                  table[position / model->block_size], position % model->block_size);
    }
  }
}
