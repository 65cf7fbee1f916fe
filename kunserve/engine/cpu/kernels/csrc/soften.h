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

/* Which keys of a span a row sees: those `first + i` for i <= `more`, as unsigned numbers. */
typedef struct {
  int first, more;
} seen_run;

INLINE seen_run run_of(const attention_job *job, long position, long from) {
  long window = job->window, first = 0, last = position - from;
  if (window > 0 && last - window + 1 > 0) first = last - window + 1;
  if (last >= SPAN) last = SPAN - 1;
  if (last < first) return (seen_run){SPAN, 0}; /* none */
  return (seen_run){(int)first, (int)(last - first)};
}

/* Whether it sees those of part j. */
INLINE vi sees(seen_run run, int j) {
  const vi iota = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return (vi)((vu)(iota + (j * LANES - run.first)) <= (vu){} + (uint32_t)run.more);
}

/* A part's scores, hidden keys' -inf, and its softmax numerators. `run` is NULL where all is
 * seen. */
INLINE vf part_scores(const float *scores, int j, const seen_run *run) {
  vf s = load_f32(scores + j * LANES);
  return run == NULL ? s : choose(sees(*run, j), s, splat(-__builtin_inff()));
}
/* And the softmax numerators of its first parts, added to `sum`. */
INLINE vf numerators(elem *weights, const float *scores, const int parts, const seen_run *run,
                     vf base) {
  vf e[SPAN / LANES], sum = {};
  UNROLL for (int j = 0; j < parts; j++) e[j] = load_f32(scores + j * LANES) - base;
  exp_all(e, parts);
  UNROLL for (int j = 0; j < parts; j++) {
    if (run != NULL) e[j] = choose(sees(*run, j), e[j], (vf){});
    sum += e[j];
    store(weights + j * LANES, e[j]);
  }
  return sum;
}

/* Softmax numerators of one row over a span, and how far the row's past results shrink. */
INLINE void soften_by(attention_buffers *b, long row, const seen_run *run) {
  const float *scores = b->scores + row * SPAN;
  vf top = part_scores(scores, 0, run);
  UNROLL for (int j = 1; j < SPAN / LANES; j++) top = max_vf(top, part_scores(scores, j, run));
  float peak = max_lanes(top), past = b->seen.peak[row];
  if (past > peak) peak = past;
  vf base = splat(peak == -__builtin_inff() ? 0.0f : peak);
  vf sum = numerators(b->weights + row * SPAN, scores, SPAN / LANES, run, base);
  vf rescale = exp_vf(splat(past) - base);
  b->rescale[row] = rescale[0];
  b->seen.total[row] = grown_total(splat(b->seen.total[row]), rescale, splat(sum_lanes(sum)))[0];
  b->seen.peak[row] = peak;
}

INLINE void soften_row(attention_buffers *b, long row, seen_run run) {
  if (run.first == 0 && run.more == SPAN - 1) soften_by(b, row, NULL);
  else soften_by(b, row, &run);
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

/* `soften_by` for `rows` <= 16 rows, which see these runs (NULL: all) of the span's first `parts`
 * parts. */
INLINE void soften_together(attention_buffers *b, long row, const int rows, const int parts,
                            const seen_run *runs) {
  vf each[LANES] = {};
  float past_of[LANES] = {}, total_of[LANES] = {}, base_of[LANES];
  for (int r = 0; r < rows; r++) {
    const float *scores = b->scores + (row + r) * SPAN;
    const seen_run *run = runs == NULL ? NULL : &runs[r];
    vf top = part_scores(scores, 0, run);
    UNROLL for (int j = 1; j < parts; j++) top = max_vf(top, part_scores(scores, j, run));
    each[r] = top;
    past_of[r] = b->seen.peak[row + r];
    total_of[r] = b->seen.total[row + r];
  }
  vf past = load_f32(past_of), peak = max_vf(maxima_of_sixteen(each), past);
  vf base = choose(peak == splat(-__builtin_inff()), (vf){}, peak);
  store_f32(base_of, base);
  for (int r = 0; r < rows; r++) {
    const float *scores = b->scores + (row + r) * SPAN;
    const seen_run *run = runs == NULL ? NULL : &runs[r];
    elem *weights = b->weights + (row + r) * SPAN;
    each[r] = numerators(weights, scores, parts, run, splat(base_of[r]));
    UNROLL for (int j = parts; j < SPAN / LANES; j++) store(weights + j * LANES, (vf){});
  }
  vf rescale = exp_vf(past - base);
  vf total = grown_total(load_f32(total_of), rescale, sums_of_sixteen(each));
  memcpy(b->rescale + row, &rescale, (size_t)rows * 4);
  memcpy(b->seen.total + row, &total, (size_t)rows * 4);
  memcpy(b->seen.peak + row, &peak, (size_t)rows * 4);
}

static void soften_sixteen(attention_buffers *b, long row) {
  soften_together(b, row, LANES, SPAN / LANES, NULL);
}
static void soften_few(attention_buffers *b, long row, int rows) {
  soften_together(b, row, rows, SPAN / LANES, NULL);
}
static void soften_partly(attention_buffers *b, long row, int rows, int parts,
                          const seen_run *runs) {
  switch (parts) {
    case 1: soften_together(b, row, rows, 1, runs); break;
    case 2: soften_together(b, row, rows, 2, runs); break;
    case 3: soften_together(b, row, rows, 3, runs); break;
    default: soften_together(b, row, rows, 4, runs);
  }
}
_Static_assert(SPAN / LANES == 4, "parts of a span");
#define FEWEST_TOGETHER 4

/* All rows of the piece that see any of the span, which are `per_head` for each kv head. */
static void soften_rows(const attention_job *job, const attention_piece *piece,
                        attention_buffers *b, long per_head, long from) {
  long group = job->model->heads / job->model->kv_heads, window = job->window;
  long rows = per_head * piece->num_kv_heads;
  for (long row = first_seeing(piece, group, from); row < rows;) {
    int count = rows - row < LANES ? (int)(rows - row) : LANES, is_one = piece->num_kv_heads == 1;
    long earliest = piece->first + (is_one ? row / group : 0);
    long latest = piece->first + (is_one ? (row + count - 1) / group : piece->queries - 1);
    int sees_all = earliest - from >= SPAN - 1 && (window <= 0 || latest - window < from);
    if (count < FEWEST_TOGETHER) count = 1;
    seen_run runs[LANES];
    for (int r = 0; r < count && !(sees_all && count > 1); r++) {
      runs[r] = run_of(job, piece->first + (row + r) % per_head / group, from);
    }
    if (count == 1) {
      soften_row(b, row, runs[0]);
    } else if (!sees_all) {
      long parts = (latest - from) / LANES + 1;
      soften_partly(b, row, count, parts < SPAN / LANES ? (int)parts : SPAN / LANES, runs);
    } else if (count == LANES) {
      soften_sixteen(b, row);
    } else {
      soften_few(b, row, count);
    }
    row += count;
  }
}
