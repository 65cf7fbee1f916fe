/* e^x and what is made of it, of vectors that fit the registers. Needs pieces.h. */
#ifndef KUN_GATES_H
#define KUN_GATES_H

#include "pieces.h"

/* e^x for x <= 88, within 2 ulp; below -87 the result is e^-87. e^0 is exactly 1. Of `n` (a constant,
 * at most 4) vectors, each operation of all before the next: none waits for its own last one. */
INLINE void exp_all(pf *x, const int n) {
  const pf magic = piece_splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
  pf shifted[4], r[4], p[4];
  UNROLL for (int i = 0; i < n; i++) x[i] = piece_max(x[i], piece_splat(-87.0f));
  UNROLL for (int i = 0; i < n; i++) {
    shifted[i] = piece_dot_f32(magic, (pi)x[i], (pi)piece_splat(1.44269504f));
  }
#define EACH(result, sum, a, b) \
  UNROLL for (int i = 0; i < n; i++) result = piece_dot_f32(sum, (pi)(a), (pi)(b))
  EACH(r[i], x[i], shifted[i] - magic, piece_splat(-0.693359375f));
  EACH(r[i], r[i], shifted[i] - magic, piece_splat(2.12194440e-4f));
  EACH(p[i], piece_splat(1.3981999507e-3f), piece_splat(1.9875691500e-4f), r[i]);
  EACH(p[i], piece_splat(8.3334519073e-3f), p[i], r[i]);
  EACH(p[i], piece_splat(4.1665795894e-2f), p[i], r[i]);
  EACH(p[i], piece_splat(1.6666665459e-1f), p[i], r[i]);
  EACH(p[i], piece_splat(5.0000001201e-1f), p[i], r[i]);
  EACH(p[i], r[i] + piece_splat(1.0f), p[i], r[i] * r[i]);
#undef EACH
  UNROLL for (int i = 0; i < n; i++) {
    x[i] = (pf)((pu)p[i] + ((pu)shifted[i] << 23)); /* unsigned: it wraps */
  }
}

/* e^-x, at most e^87. */
INLINE void exp_minus_all(pf *x, const int n) {
  UNROLL for (int i = 0; i < n; i++) x[i] = piece_min(-x[i], piece_splat(87.0f));
  exp_all(x, n);
}

/* x * sigmoid(x). */
INLINE void silu_all(pf *x, const int n) {
  pf e[4];
  UNROLL for (int i = 0; i < n; i++) e[i] = x[i];
  exp_minus_all(e, n);
  UNROLL for (int i = 0; i < n; i++) x[i] = x[i] / (piece_splat(1.0f) + e[i]);
}

/* GELU by its tanh: x (1 + tanh(u)) / 2 is x sigmoid(2 u). */
INLINE void gelu_all(pf *x, const int n) {
  pf e[4];
  UNROLL for (int i = 0; i < n; i++) {
    pf cubed = x[i] * x[i] * x[i];
    e[i] = piece_splat(1.5957691216f) * (x[i] + piece_splat(0.044715f) * cubed);
  }
  exp_minus_all(e, n);
  UNROLL for (int i = 0; i < n; i++) x[i] = x[i] / (piece_splat(1.0f) + e[i]);
}

INLINE vf exp_vf(vf x) {
  UNROLL for (int p = 0; p < PIECES; p++) {
    pf piece = *piece_of(&x, p);
    exp_all(&piece, 1);
    *piece_of(&x, p) = piece;
  }
  return x;
}

/* tanh(x), within 1e-7. */
INLINE vf tanh_vf(vf x) {
  x += x;
  UNROLL for (int p = 0; p < PIECES; p++) {
    pf piece = *piece_of(&x, p);
    exp_minus_all(&piece, 1);
    *piece_of(&x, p) = piece;
  }
  return splat(2.0f) / (splat(1.0f) + x) - splat(1.0f);
}

#endif
