/* A few rows of x against 16 rows of w, for scores of decodes. Included by attention_span.h.
 *
 * The same products as `direct` and `sweep` make, in the same order, so the same bits. But x is read
 * often and changes rarely: each 16 bytes of it lie there four times. A plain load costs nothing
 * beside products, and one that spreads takes as long as half a product. Rows are multiples of 64
 * bytes, so that no step has to ask how much is left. */
#define SPREAD_BYTES(bytes) (4 * (bytes))

INLINE void spread_rows(char *spread, const char *x, long bytes) {
  for (long at = 0; at < bytes; at += 16) {
    *(vi_u *)(spread + SPREAD_BYTES(at)) = spread_16_bytes(x + at);
  }
}

/* Quads `first` and `first` + 1 of the panel. Fetches as many lines of `list` as are read here, one
 * part after the other: many prefetches at once delay each other. */
#define FETCHED_LINES 8
INLINE void spread_pair(const int rows, vf (*acc)[4], const int first, const char *const *w,
                        const char *spread, long row_bytes, fetch_list *list) {
  vf sum[SWEEP_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int q = 0; q < 2; q++) sum[i][q] = (vf){};
  w += first;
  for (long at = 0; at < row_bytes; at += 64) {
    vi even[4], odd[4];
    fetch_more(list, FETCHED_LINES);
    quad_steps(even, w[0] + at, w[4] + at, w[8] + at, w[12] + at, 64);
    quad_steps(odd, w[1] + at, w[5] + at, w[9] + at, w[13] + at, 64);
    UNROLL for (int s = 0; s < 4; s++) UNROLL for (int i = 0; i < rows; i++) {
      vi row = *(const vi_u *)(spread + SPREAD_BYTES(i * row_bytes + at + s * 16));
      sum[i][0] = dot(sum[i][0], even[s], row);
      sum[i][1] = dot(sum[i][1], odd[s], row);
    }
  }
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int q = 0; q < 2; q++) {
    acc[i][first + q] = sum[i][q];
  }
}

INLINE void spread_of(const int rows, vf *out, const char *const *w, const char *spread,
                      long row_bytes, fetch_list *list) {
  vf acc[SWEEP_ROWS][4];
  spread_pair(rows, acc, 0, w, spread, row_bytes, list);
  spread_pair(rows, acc, 2, w, spread, row_bytes, list);
  UNROLL for (int i = 0; i < rows; i++) out[i] = add_slots(acc[i]);
}

/* out[i] = the 16 dot products of row i with the rows of w, for i < rows <= SWEEP_ROWS. */
static void spread_dots(int rows, vf *out, const char *const *w, const char *spread,
                        long row_bytes, fetch_list *list) {
#define CASE(n) \
  case n: spread_of(n, out, w, spread, row_bytes, list); break;
  switch (rows) {
    CASE(1) CASE(2) CASE(3) CASE(4)
#ifdef __AVX512F__
    CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10)
#endif
  }
#undef CASE
}
