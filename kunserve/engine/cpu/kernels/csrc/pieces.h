/* Vectors that fit the processor's registers: a whole one, or its halves with AVX2. gcc keeps no
 * wider vector in registers from one turn of a loop to the next, so what a loop adds to is in
 * pieces. Lanes are as in the whole vector, piece after piece. Needs vec.h. */
#ifndef KUN_PIECES_H
#define KUN_PIECES_H

#include "vec.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(__AVX512F__)
#define PIECE 8 /* lanes */
typedef float pf __attribute__((vector_size(32)));
typedef int32_t pi __attribute__((vector_size(32)));
typedef uint32_t pu __attribute__((vector_size(32)));
typedef uint16_t piece_words __attribute__((vector_size(32)));
typedef int16_t piece_signed_words __attribute__((vector_size(32)));
typedef float pf_u __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t pi_u __attribute__((vector_size(32), aligned(1), may_alias));

INLINE pf piece_f16(const char *p) {
  return (pf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
INLINE pi piece_bytes(const uint8_t *p) {
  return (pi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
INLINE pi piece_signed(const int8_t *p) {
  return (pi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
INLINE pf piece_to_float(pi v) { return (pf)_mm256_cvtepi32_ps((__m256i)v); }
INLINE pi piece_spread(const void *p) {
  int32_t x;
  memcpy(&x, p, 4);
  return x - (pi){};
}
INLINE pi piece_spread_16(const void *p) {
  return (pi)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
}
INLINE pf piece_splat(float x) { return x - (pf){}; }
/* Rounded once, whatever the compiler makes of sums of products: rows that share a call in other
 * numbers take `add_product`, and have the same bits. */
INLINE pf piece_dot_f32(pf acc, pi a, pi b) {
  return (pf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)acc);
}
/* The same in the order as written, where it is: with all registers full gcc finds another one, for
 * which they do not suffice. */
INLINE void add_product(pf *acc, pi a, pi b) {
  __asm__ volatile("vfmadd231ps %2, %1, %0" : "+x"(*acc) : "x"(a), "x"(b));
}
INLINE pf piece_dot_bf16(pf acc, pi a, pi b) {
  acc = piece_dot_f32(acc, a & (int32_t)0xffff0000, b & (int32_t)0xffff0000);
  return piece_dot_f32(acc, a << 16, b << 16);
}
INLINE pf piece_max(pf a, pf b) { return (pf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE pf piece_min(pf a, pf b) { return (pf)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE pi piece_dot_words(pi a, pi b) {
  return (pi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
/* As `dot_bytes` of AVX2. */
INLINE pi piece_dot_bytes(pi acc, pi w, pi x) {
  acc += piece_dot_words(w & 0x00ff00ff, (pi)((piece_signed_words)x << 8 >> 8));
  return acc + piece_dot_words((pi)((piece_words)w >> 8), (pi)((piece_signed_words)x >> 8));
}
#else
#define PIECE LANES
typedef vf pf;
typedef vi pi;
typedef vu pu;
typedef vf_u pf_u;
typedef vi_u pi_u;
INLINE pf piece_f16(const char *p) { return widen_f16(*(const half_u *)p); }
INLINE pi piece_bytes(const uint8_t *p) { return widen_bytes(p); }
INLINE pi piece_signed(const int8_t *p) { return widen_signed(p); }
INLINE pf piece_to_float(pi v) { return to_float(v); }
INLINE pi piece_spread(const void *p) { return spread_4_bytes(p); }
INLINE pi piece_spread_16(const void *p) { return spread_16_bytes(p); }
INLINE pf piece_splat(float x) { return splat(x); }
INLINE pf piece_dot_f32(pf acc, pi a, pi b) { return dot_f32(acc, a, b); }
INLINE void add_product(pf *acc, pi a, pi b) { *acc = dot_f32(*acc, a, b); }
INLINE pf piece_dot_bf16(pf acc, pi a, pi b) { return dot_bf16(acc, a, b); }
INLINE pi piece_dot_bytes(pi acc, pi w, pi x) { return dot_bytes(acc, w, x); }
INLINE pf piece_max(pf a, pf b) { return max_vf(a, b); }
INLINE pf piece_min(pf a, pf b) { return min_vf(a, b); }
#endif

#define PIECES (LANES / PIECE)

/* Where a piece of a vector lies. */
INLINE pf_u *piece_of(vf *v, int piece) { return (pf_u *)v + piece; }

#endif
