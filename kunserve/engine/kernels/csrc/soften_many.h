/* Softmax of many rows over one span of keys: a piece of a prompt. Needs attention_span.h.
 *
 * Sixteen rows add up and compare together what one row has to fold, in the same order. So no bit
 * tells which way a row went. */

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

/* `soften` for 16 rows, which see all keys of the span. */
static void soften_sixteen(attention_buffers *b, long row) {
  vf each[LANES];
  UNROLL for (int r = 0; r < LANES; r++) {
    const float *s = b->scores + (row + r) * SPAN;
    each[r] = load_f32(s);
    UNROLL for (int j = 1; j < SPAN / LANES; j++) each[r] = max_vf(each[r], load_f32(s + j * LANES));
  }
  vf past = load_f32(b->seen.peak + row), peak = max_vf(maxima_of_sixteen(each), past);
  vf base = choose(peak == splat(-__builtin_inff()), (vf){}, peak);
  float bases[LANES];
  store_f32(bases, base);
  UNROLL for (int r = 0; r < LANES; r++) {
    vf from = splat(bases[r]), sum = {};
    UNROLL for (int j = 0; j < SPAN / LANES; j++) {
      vf e = exp_vf(load_f32(b->scores + (row + r) * SPAN + j * LANES) - from);
      sum += e;
      store(b->weights + (row + r) * SPAN + j * LANES, e);
    }
    each[r] = sum;
  }
  vf rescale = exp_vf(past - base);
  store_f32(b->rescale + row, rescale);
  vf total = load_f32(b->seen.total + row);
  store_f32(b->seen.total + row, grown_total(total, rescale, sums_of_sixteen(each)));
  store_f32(b->seen.peak + row, peak);
}

static void soften_rows(const attention_job *job, const attention_piece *piece,
                        attention_buffers *b, long rows, long from, long keys, float factor) {
  long group = job->model->heads / job->model->kv_heads, window = job->window;
  for (long row = 0; row < rows;) {
    long position = piece->first + row / group;
    long last = piece->first + (row + LANES - 1) / group;
    int sees_all = position - from >= SPAN - 1 && (window <= 0 || last - window < from);
    if (row + LANES <= rows && sees_all && factor == 1.0f) {
      soften_sixteen(b, row);
      row += LANES;
    } else {
      soften_row(job, b, row, position, from, keys, factor);
      row++;
    }
  }
}
