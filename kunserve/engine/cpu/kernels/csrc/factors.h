/* What the linears' passes read of x, and into which passes rows of x are cut. Needs typed.h and
 * transpose.h.
 *
 * Factors are what products read of x. Without products of bfloat16 they are floats: x is widened
 * once for many panels, and a vector of w once for a pass. Where x is widened with AVX-512, and
 * always with AVX2, they lie in the order in which a pass reads them: one run of memory, where the
 * rows of x would be as many. Elsewhere they are x as it lies. */
#if defined(KUN_BF16) && (defined(__AVX512F__) || PIECE < LANES) && !defined(HAS_BF16) && \
    !defined(AMX_PRODUCTS)
#define WIDENS_X
typedef float factor;
#else
typedef elem factor;
#endif
#if defined(WIDENS_X) || (PIECE < LANES && !defined(AMX_PRODUCTS))
#define ORDERS_X
#endif
#define FACTOR_STEP (16 / (long)sizeof(elem) * (long)sizeof(factor)) /* bytes of x in a step */
#define FACTOR_SLOT (FACTOR_STEP / 4)

/* Rows of x that share a pass over a panel: their sums fill the registers. Where w is widened a pass
 * has as many as it can, because all share that; more than ALL_SLOTS_ROWS take two slots of a panel
 * at a time. With AVX2 more than TWO_SLOTS_ROWS take one. Elsewhere, from two passes on, each has at
 * least half as many: fewer would read the panel more often than memory is waited for. */
#if PIECE < LANES
#define PASS_ROWS 6
#define ALL_SLOTS_ROWS 1
#define TWO_SLOTS_ROWS 3
#elif defined(ORDERS_X)
#define PASS_ROWS 14
#define ALL_SLOTS_ROWS 7
#elif defined(__AVX512F__)
#define PASS_ROWS 7
#define LEAST_PASS_ROWS 4
#else
#define PASS_ROWS 3
#define LEAST_PASS_ROWS 2
#endif

/* Into how many passes over a panel so many rows are cut. */
INLINE int passes_of(long rows) {
#ifdef LEAST_PASS_ROWS
  return rows <= PASS_ROWS ? 1 : (int)(rows / LEAST_PASS_ROWS);
#else
  return (int)((rows + PASS_ROWS - 1) / PASS_ROWS);
#endif
}

/* In how many turns a pass reads a panel: turn t has the slots t, t + turns, ... */
INLINE int turns_of(int rows) {
#if PIECE < LANES
  return rows <= ALL_SLOTS_ROWS ? 1 : rows <= TWO_SLOTS_ROWS ? 2 : 4;
#elif defined(ORDERS_X)
  return rows <= ALL_SLOTS_ROWS ? 1 : 2;
#else
  (void)rows;
  return 1;
#endif
}

#ifdef ORDERS_X
#if PIECE < LANES
/* One slot's factors of some rows, of which `v` has 4 bytes each. What lies behind them may be
 * overwritten, unless it is `exact`. */
INLINE void put_slot(const int rows, float *to, pi v, int exact) {
#ifdef WIDENS_X
  const pi parts[2] = {v & (int32_t)0xffff0000, v << 16};
#else
  const pi parts[1] = {v};
#endif
  UNROLL for (int part = 0; part < FACTOR_SLOT / 4; part++, to += rows) {
    if (exact) memcpy(to, &parts[part], (size_t)rows * 4);
    else *(pi_u *)to = parts[part];
  }
}

/* A pass's factors: [turn][step][slot of the turn][odd, even column][row]; x is not always widened,
 * and then there is one column. */
INLINE void order_rows(const int rows, float *to, const elem *const *x, long k) {
  const int turns = turns_of(rows);
  const long bytes = k * (long)sizeof(elem), slot_floats = rows * FACTOR_SLOT / 4;
  const char *at[8];
  char slots[8 * 64], last[8][32] = {{0}};
  UNROLL for (int r = 0; r < 8; r++) at[r] = (const char *)x[r < rows ? r : 0];
  for (long from = 0; from < bytes; from += 32) {
    if (bytes - from >= 32) {
      transpose_32_bytes(slots, at, from);
    } else {
      UNROLL for (int r = 0; r < 8; r++) {
        memcpy(last[r], at[r] + from, 16);
        at[r] = last[r];
      }
      transpose_32_bytes(slots, at, 0);
    }
    int exact = bytes - from <= 64; /* behind the last slots another turn begins */
    UNROLL for (int i = 0; i < 8; i++) {
      long slot = i % 4, step = from / 16 + i / 4, of_turn = 4 / turns;
      if (step * 16 >= bytes) return;
      long place = (slot % turns * (bytes / 16) + step) * of_turn + slot / turns;
      put_slot(rows, to + place * slot_floats, *(const pi_u *)(slots + i * 64), exact);
    }
  }
}

static void order_one(float *restrict to, const elem *restrict x, long k) {
#ifdef WIDENS_X
  uint32_t *bits = (uint32_t *)to;
  for (long c = 0; c < k; c += 2) {
    bits[c] = (uint32_t)x[c + 1] << 16;
    bits[c + 1] = (uint32_t)x[c] << 16;
  }
#else
  memcpy(to, x, (size_t)k * sizeof(elem));
#endif
}

static void order_pass(float *to, const elem *const *x, int rows, long k) {
  switch (rows) {
    case 1: order_one(to, x[0], k); break;
    case 2: order_rows(2, to, x, k); break;
    case 3: order_rows(3, to, x, k); break;
    case 4: order_rows(4, to, x, k); break;
    case 5: order_rows(5, to, x, k); break;
    default: order_rows(PASS_ROWS, to, x, k);
  }
}
#else
/* The factors of a pass: [turn][step][slot of the turn][odd, even column][row]. */
static void order_pass(float *to, const elem *const *x, int rows, long k) {
  const long bytes = k * (long)sizeof(elem), pair = 2 * rows;
  const int turns = turns_of(rows);
  const __mmask16 those = (__mmask16)((1 << rows) - 1);
  const char *at[PANEL];
  char slots[PANEL * 64];
  for (int r = 0; r < PANEL; r++) at[r] = (const char *)x[r < rows ? r : 0];
  for (long from = 0; from < bytes; from += 64) {
    long left = bytes - from < 64 ? bytes - from : 64;
    transpose_64_bytes(slots, at, from, left);
    for (int turn = 0; turn < turns; turn++) {
      float *at_turn = to + turn * (bytes / 8 * pair);
      for (long slot = turn; slot < left / 4; slot += turns, at_turn += pair) {
        __m512i of_all = _mm512_loadu_si512(slots + slot * 64);
        __m512i odd = _mm512_and_si512(of_all, _mm512_set1_epi32((int)0xffff0000));
        _mm512_mask_storeu_epi32(at_turn, those, odd);
        _mm512_mask_storeu_epi32(at_turn + rows, those, _mm512_slli_epi32(of_all, 16));
      }
    }
    to += left / 4 / turns * pair;
  }
}
#endif
#endif

/* Row `i` of those that `which` names; NULL names all. */
INLINE const elem *row_of(const elem *x, const int32_t *which, long i, long k) {
  return x + (which ? which[i] : i) * k;
}

/* The factors of some rows, each as it lies. */
INLINE void put_rows(char *restrict to, const elem *restrict x, long rows, long k) {
#ifdef WIDENS_X
  uint32_t *bits = (uint32_t *)to;
  for (long i = 0; i < rows * k; i++) bits[i] = (uint32_t)x[i] << 16;
#else
  memcpy(to, x, (size_t)(rows * k) * sizeof(factor));
#endif
}

/* What pass `pass` of `rows` rows of x reads, at its place behind `to`; see `put_factors`. */
INLINE void put_pass(char *restrict to, const elem *restrict x, const int32_t *which, long rows,
                     long k, int pass) {
  long passes = passes_of(rows), first = rows * pass / passes, end = rows * (pass + 1) / passes;
#ifdef ORDERS_X
  const elem *of[PASS_ROWS];
  for (long i = first; i < end; i++) of[i - first] = row_of(x, which, i, k);
  order_pass((float *)to + first * k, of, (int)(end - first), k);
#else
  for (long i = first; i < end; i++) {
    put_rows(to + i * k * (long)sizeof(factor), row_of(x, which, i, k), 1, k);
  }
#endif
}

/* `rows` rows of x as factors, at `to`, for `passes_of` them; those that `which` names, unless it is
 * NULL. */
INLINE void put_factors(char *restrict to, const elem *restrict x, const int32_t *which, long rows,
                        long k) {
  for (int pass = 0; pass < passes_of(rows); pass++) put_pass(to, x, which, rows, k, pass);
}

/* Whether rows of x are not factors as they lie. */
INLINE int needs_factors(long rows) {
#ifdef WIDENS_X
  return rows > 0;
#elif defined(ORDERS_X)
  return rows > 1;
#else
  return 0;
#endif
}

/* Where rows of x lie as factors: at `to`, if it is not so already. */
INLINE const char *factors_of(char *to, const elem *x, long rows, long k) {
  if (!needs_factors(rows)) return (const char *)x;
  put_factors(to, x, NULL, rows, k);
  return to;
}

/* What `factors_of` needs for so many elements. */
INLINE size_t factor_bytes(long count) {
#ifdef ORDERS_X
  return (size_t)count * sizeof(factor);
#else
  (void)count;
  return 0;
#endif
}
