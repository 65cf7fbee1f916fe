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
INLINE pf grown_total(pf total, pf rescale, pf sum) {
  return piece_dot_f32(sum, (pi)total, (pi)rescale);
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

/* Whether it sees those of piece j. */
INLINE pi sees(seen_run run, int j) {
  pi position = {0, 1, 2, 3, 4, 5, 6, 7};
#if PIECE == LANES
  position += (pi){0, 0, 0, 0, 0, 0, 0, 0, 8, 9, 10, 11, 12, 13, 14, 15};
#endif
  return (pi)((pu)(position + (j * PIECE - run.first)) <= (pu){} + (uint32_t)run.more);
}
INLINE pf piece_choose(pi mask, pf a, pf b) { return (pf)((mask & (pi)a) | (~mask & (pi)b)); }

/* A piece's scores, hidden keys' -inf. `run` is NULL where all is seen. */
INLINE pf piece_scores(const float *scores, int j, const seen_run *run) {
  pf s = *(const pf_u *)(scores + j * PIECE);
  return run == NULL ? s : piece_choose(sees(*run, j), s, piece_splat(-__builtin_inff()));
}
/* The largest of a span's first parts, in each lane of a piece. */
INLINE pf top_scores(const float *scores, const int parts, const seen_run *run) {
  pf top[PIECES];
  UNROLL for (int p = 0; p < PIECES; p++) top[p] = piece_scores(scores, p, run);
  UNROLL for (int j = PIECES; j < parts * PIECES; j++) {
    top[j % PIECES] = piece_max(top[j % PIECES], piece_scores(scores, j, run));
  }
  return PIECES == 1 ? top[0] : piece_max(top[0], top[PIECES - 1]);
}

INLINE void store_weights(weight *to, pf numerator) {
#ifdef WIDENS_WEIGHTS
  *(pf_u *)to = piece_rounded(numerator);
#elif PIECE < LANES
  store_piece(to, numerator, PIECE);
#else
  store(to, numerator);
#endif
}
/* And the softmax numerators of these parts; their sums in each lane of a piece. */
INLINE pf numerators(weight *weights, const float *scores, const int parts, const seen_run *run,
                     pf base) {
  const int together = SPAN / LANES;
  pf sum[PIECES] = {};
  UNROLL for (int first = 0; first < parts * PIECES; first += together) {
    const int left = parts * PIECES - first, count = left < together ? left : together;
    pf e[SPAN / LANES];
    UNROLL for (int j = 0; j < count; j++) {
      e[j] = *(const pf_u *)(scores + (first + j) * PIECE) - base;
    }
    exp_all(e, count);
    UNROLL for (int j = 0; j < count; j++) {
      if (run != NULL) e[j] = piece_choose(sees(*run, first + j), e[j], (pf){});
      sum[(first + j) % PIECES] += e[j];
      store_weights(weights + (first + j) * PIECE, e[j]);
    }
  }
  return PIECES == 1 ? sum[0] : sum[0] + sum[PIECES - 1];
}

/* Of a piece that is joined from all of a vector: as `max_lanes` and `sum_lanes` go on. */
#if PIECE < LANES
INLINE vf half_lanes(pf v, float rest) {
  vf all = splat(rest);
  *piece_of(&all, 0) = v;
  return all;
}
INLINE float piece_top(pf v) { return max_lanes(half_lanes(v, -__builtin_inff())); }
INLINE float piece_total(pf v) { return sum_lanes(half_lanes(v, 0.0f)); }
#else
INLINE float piece_top(pf v) { return max_lanes(v); }
INLINE float piece_total(pf v) { return sum_lanes(v); }
#endif

/* Softmax numerators of one row over a span, and how far the row's past results shrink. */
INLINE void soften_by(attention_buffers *b, long row, const seen_run *run) {
  const float *scores = b->scores + row * SPAN;
  float peak = piece_top(top_scores(scores, SPAN / LANES, run)), past = b->seen.peak[row];
  if (past > peak) peak = past;
  float base = peak == -__builtin_inff() ? 0.0f : peak;
  pf sum = numerators(b->weights + row * SPAN, scores, SPAN / LANES, run, piece_splat(base));
  pf rescale = piece_splat(past - base);
  exp_all(&rescale, 1);
  b->rescale[row] = rescale[0];
  b->seen.total[row] =
      grown_total(piece_splat(b->seen.total[row]), rescale, piece_splat(piece_total(sum)))[0];
  b->seen.peak[row] = peak;
}

INLINE void soften_row(attention_buffers *b, long row, seen_run run) {
  if (run.first == 0 && run.more == SPAN - 1) soften_by(b, row, NULL);
  else soften_by(b, row, &run);
}

/* Lane r of the result is what `piece_total` or `piece_top` gives of v[r], of as many as a piece has
 * lanes: added up in their order. */
#if PIECE < LANES
#define JOIN_ALL(name, join)                                                                  \
  INLINE pf name(pf *v) {                                                                     \
    UNROLL for (int k = 0; k < 4; k++) {                                                      \
      __m256 a = (__m256)v[k], b = (__m256)v[k + 4];                                          \
      v[k] = join((pf)_mm256_permute2f128_ps(a, b, 0x20),                                     \
                  (pf)_mm256_permute2f128_ps(a, b, 0x31));                                    \
    }                                                                                         \
    UNROLL for (int k = 0; k < 2; k++) {                                                      \
      __m256 a = (__m256)v[k], b = (__m256)v[k + 2];                                          \
      v[k] = join((pf)_mm256_shuffle_ps(a, b, 0x44), (pf)_mm256_shuffle_ps(a, b, 0xee));      \
    }                                                                                         \
    __m256 a = (__m256)v[0], b = (__m256)v[1];                                                \
    pf all = join((pf)_mm256_shuffle_ps(a, b, 0x88), (pf)_mm256_shuffle_ps(a, b, 0xdd));      \
    return (pf)_mm256_permute_ps((__m256)all, 0xd8);                                          \
  }
#else
#define EVEN_PAIRS 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define ODD_PAIRS 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define JOIN_ALL(name, join)                                                              \
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
#endif
INLINE pf piece_add(pf a, pf b) { return a + b; }
JOIN_ALL(sums_of_all, piece_add)
JOIN_ALL(maxima_of_all, piece_max)

/* `soften_by` for `rows` <= 16 rows, which see these runs (NULL: all) of the span's first `parts`
 * parts. */
INLINE void soften_together(attention_buffers *b, long row, const int rows, const int parts,
                            const seen_run *runs) {
  pf each[LANES] = {};
  float past_of[LANES] = {}, total_of[LANES] = {}, base_of[LANES], peak_of[LANES], shrink_of[LANES];
  for (int r = 0; r < rows; r++) {
    const seen_run *run = runs == NULL ? NULL : &runs[r];
    each[r] = top_scores(b->scores + (row + r) * SPAN, parts, run);
    past_of[r] = b->seen.peak[row + r];
    total_of[r] = b->seen.total[row + r];
  }
  UNROLL for (int r = 0; r < LANES; r += PIECE) {
    pf past = *(pf_u *)(past_of + r), peak = piece_max(maxima_of_all(each + r), past);
    pf base = piece_choose(peak == piece_splat(-__builtin_inff()), (pf){}, peak);
    *(pf_u *)(peak_of + r) = peak;
    *(pf_u *)(base_of + r) = base;
  }
  for (int r = 0; r < rows; r++) {
    const float *scores = b->scores + (row + r) * SPAN;
    const seen_run *run = runs == NULL ? NULL : &runs[r];
    weight *weights = b->weights + (row + r) * SPAN;
    each[r] = numerators(weights, scores, parts, run, piece_splat(base_of[r]));
    UNROLL for (int j = parts * PIECES; j < SPAN / PIECE; j++) {
      store_weights(weights + j * PIECE, (pf){});
    }
  }
  UNROLL for (int r = 0; r < LANES; r += PIECE) {
    pf shrink = *(pf_u *)(past_of + r) - *(pf_u *)(base_of + r);
    exp_all(&shrink, 1);
    *(pf_u *)(shrink_of + r) = shrink;
    *(pf_u *)(total_of + r) = grown_total(*(pf_u *)(total_of + r), shrink, sums_of_all(each + r));
  }
  memcpy(b->rescale + row, shrink_of, (size_t)rows * 4);
  memcpy(b->seen.total + row, total_of, (size_t)rows * 4);
  memcpy(b->seen.peak + row, peak_of, (size_t)rows * 4);
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
