/* Included by bf16.c and f32.c, which define KUN_BF16 or not: names and loads of the element. */
#include "api.h"
#include "gates.h"
#include "pool.h"
#include "vec.h"

#include <stdatomic.h>
#include <stdint.h>

#ifdef KUN_BF16
typedef uint16_t elem;
#define NAME(f) f##_bf16
#else
typedef float elem;
#define NAME(f) f##_f32
#endif

INLINE vf load(const elem *p) { return NAME(load)(p); }
INLINE void store(elem *p, vf v) { NAME(store)(p, v); }
INLINE vf load_part(const elem *p, int count) { return NAME(load_part)(p, count); }
INLINE void store_part(elem *p, vf v, int count) { NAME(store_part)(p, v, count); }
INLINE vf dot(vf acc, vi a, vi b) { return NAME(dot)(acc, a, b); }
/* v as it would read back after being stored. */
INLINE vf rounded(vf v) {
#if defined(KUN_BF16) && PIECE < LANES
  vi bits = (vi)v;
  return (vf)((bits + (0x7fff + ((bits >> 16) & 1))) & (int32_t)0xffff0000);
#elif defined(KUN_BF16)
  return widen(narrow(v));
#else
  return v;
#endif
}
INLINE vf load_some(const elem *p, int count) {
  return count >= LANES ? load(p) : load_part(p, count);
}
INLINE void store_some(elem *p, vf v, int count) {
  if (count >= LANES) store(p, v);
  else store_part(p, v, count);
}
#if PIECE < LANES
/* As `rounded` and `store_part`, of a piece. */
INLINE pf piece_rounded(pf v) {
#ifdef KUN_BF16
  pi bits = (pi)v;
  return (pf)((bits + (0x7fff + ((bits >> 16) & 1))) & (int32_t)0xffff0000);
#else
  return v;
#endif
}
INLINE void store_piece(elem *p, pf v, int count) {
#ifdef KUN_BF16
  __m256i high = _mm256_srli_epi32((__m256i)piece_rounded(v), 16);
  __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0xd8);
  __m128i low = _mm256_castsi256_si128(words);
  memcpy(p, &low, count == PIECE ? PIECE * sizeof(elem) : (size_t)count * sizeof(elem));
#else
  memcpy(p, &v, count == PIECE ? PIECE * sizeof(elem) : (size_t)count * sizeof(elem));
#endif
}
#endif
