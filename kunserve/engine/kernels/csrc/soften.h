/* Softmax over one span of keys. Needs attention_span.h.
 *
 * Sixteen rows add up and compare together what one row has to fold, in the same order. So no bit
 * tells which way a row went. */

/* Bend the scores of some rows: cap tanh(score / cap). */
static void cap_scores(float cap, float *scores, long rows, long count) {
  vf to_cap = splat(1.0f / cap), from_cap = splat(cap);
  for (long row = 0; row < rows; row++) {
    for (float *s = scores + row * SPAN; s < scores + row * SPAN + count; s += LANES) {
      store_f32(s, tanh_vf(load_f32(s) * to_cap) * from_cap);
    }
  }
}

/* The sum of softmax numerators, with those of one more span. */
INLINE vf grown_total(vf total, vf rescale, vf sum) {
  return dot_f32(sum, (vi)total, (vi)rescale);
}

/* Softmax numerators of one row over a span, whose scores are `s` [parts], hidden keys' -inf; and
 * how far the row's past results shrink. */
INLINE void soften(attention_buffers *b, long row, const vf *s, const int parts,
                   const int has_hidden) {
  const vf never = splat(-__builtin_inff());
  vf top = s[0], sum = {};
  UNROLL for (int j = 1; j < parts; j++) top = max_vf(top, s[j]);
  float peak = max_lanes(top), past = b->seen.peak[row];
  if (past > peak) peak = past;
  vf base = splat(peak == -__builtin_inff() ? 0.0f : peak);
  UNROLL for (int j = 0; j < parts; j++) {
    vf e = exp_vf(s[j] - base);
    if (has_hidden) e = choose(s[j] > never, e, (vf){});
    sum += e;
    store(b->weights + row * SPAN + j * LANES, e);
  }
  vf rescale = exp_vf(splat(past) - base);
  b->rescale[row] = rescale[0];
  b->seen.total[row] = grown_total(splat(b->seen.total[row]), rescale, splat(sum_lanes(sum)))[0];
  b->seen.peak[row] = peak;
}

/* The same of scores of which some may be hidden. */
INLINE void soften_row(const attention_job *job, attention_buffers *b, long row, long position,
                       long from, long keys) {
  const vi iota = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  long window = job->window;
  int first = window > 0 && position - window + 1 > from ? (int)(position - window + 1 - from) : 0;
  int last = position - from < SPAN ? (int)(position - from) : SPAN - 1; /* may be negative */
  vf s[SPAN / LANES];
  if (first == 0 && last == SPAN - 1) {
    UNROLL for (int j = 0; j < SPAN / LANES; j++) {
      s[j] = load_f32(b->scores + row * SPAN + j * LANES);
    }
    soften(b, row, s, SPAN / LANES, 0);
    return;
  }
  int parts = (int)(keys / LANES);
  for (int j = 0; j < SPAN / LANES; j++) {
    vi at = iota + j * LANES;
    vi visible = (at >= first) & (at <= last);
    vf score = j < parts ? load_f32(b->scores + row * SPAN + j * LANES) : (vf){};
    s[j] = choose(visible, score, splat(-__builtin_inff()));
  }
  soften(b, row, s, SPAN / LANES, 1);
}

#define EVEN_PAIRS 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define ODD_PAIRS 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
/* Lane r of the result is what `sum_lanes` or `max_lanes` gives of v[r]: added up in their order. */
#define JOIN_SIXTEEN(name, join)                                                              \
  INLINE vf name(vf *v) {                                                                     \
    UNROLL for (int k = 0; k < 8; k++) {                                                      \
      v[k] = join(join_low(v[k], v[k + 8]), join_high(v[k], v[k + 8]));                       \
    }                                                                                         \
    UNROLL for (int k = 0; k < 4; k++) {                                                      \
      vi a = (vi)v[k], b = (vi)v[k + 4];                                                      \
      v[k] = join(                                                                            \
          (vf)SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),        \
          (vf)SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));     \
    }                                                                                         \
    UNROLL for (int k = 0; k < 2; k++) {                                                      \
      vi a = (vi)v[k], b = (vi)v[k + 2];                                                      \
      v[k] = join((vf)SHUFFLE(a, b, EVEN_PAIRS), (vf)SHUFFLE(a, b, ODD_PAIRS));               \
    }                                                                                         \
    vi a = (vi)v[0], b = (vi)v[1];                                                            \
    return join((vf)SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30), \
                (vf)SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)); \
  }
INLINE vf add_vf(vf a, vf b) { return a + b; }
JOIN_SIXTEEN(sums_of_sixteen, add_vf)
JOIN_SIXTEEN(maxima_of_sixteen, max_vf)

/* `soften` for `rows` <= 16 rows, which see all keys of the span. */
INLINE void soften_together(attention_buffers *b, long row, const int rows) {
  vf each[LANES] = {};
  float past_of[LANES] = {}, total_of[LANES] = {}, base_of[LANES];
  for (int r = 0; r < rows; r++) {
    const float *s = b->scores + (row + r) * SPAN;
    vf top = load_f32(s);
    UNROLL for (int j = 1; j < SPAN / LANES; j++) top = max_vf(top, load_f32(s + j * LANES));
    each[r] = top;
    past_of[r] = b->seen.peak[row + r];
    total_of[r] = b->seen.total[row + r];
  }
  vf past = load_f32(past_of), peak = max_vf(maxima_of_sixteen(each), past);
  vf base = choose(peak == splat(-__builtin_inff()), (vf){}, peak);
  store_f32(base_of, base);
  for (int r = 0; r < rows; r++) {
    vf from = splat(base_of[r]), sum = {};
    UNROLL for (int j = 0; j < SPAN / LANES; j++) {
      vf e = exp_vf(load_f32(b->scores + (row + r) * SPAN + j * LANES) - from);
      sum += e;
      store(b->weights + (row + r) * SPAN + j * LANES, e);
    }
    each[r] = sum;
  }
  vf rescale = exp_vf(past - base);
  vf total = grown_total(load_f32(total_of), rescale, sums_of_sixteen(each));
  memcpy(b->rescale + row, &rescale, (size_t)rows * 4);
  memcpy(b->seen.total + row, &total, (size_t)rows * 4);
  memcpy(b->seen.peak + row, &peak, (size_t)rows * 4);
}

static void soften_sixteen(attention_buffers *b, long row) { soften_together(b, row, LANES); }
static void soften_few(attention_buffers *b, long row, int rows) { soften_together(b, row, rows); }
#define FEWEST_TOGETHER 4

/* All rows of the piece, which are `per_head` for each kv head. */
static void soften_rows(const attention_job *job, const attention_piece *piece,
                        attention_buffers *b, long per_head, long from, long keys) {
  long group = job->model->heads / job->model->kv_heads, window = job->window;
  long rows = per_head * piece->num_kv_heads;
  for (long row = 0; row < rows;) {
    int count = rows - row < LANES ? (int)(rows - row) : LANES, is_one = piece->num_kv_heads == 1;
    long earliest = piece->first + (is_one ? row / group : 0);
    long latest = piece->first + (is_one ? (row + count - 1) / group : piece->queries - 1);
    int sees_all = earliest - from >= SPAN - 1 && (window <= 0 || latest - window < from);
    if (sees_all && count >= FEWEST_TOGETHER) {
      if (count == LANES) soften_sixteen(b, row);
      else soften_few(b, row, count);
      row += count;
    } else {
      soften_row(job, b, row, piece->first + row % per_head / group, from, keys);
      row++;
    }
  }
}
