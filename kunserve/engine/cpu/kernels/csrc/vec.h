/* A 16-lane float vector on every machine: AVX-512 intrinsics where present, GCC vectors elsewhere.
 * Every function here is a pure function of its lanes, so results never depend on batching. */
#ifndef KUN_VEC_H
#define KUN_VEC_H

#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

/* Products of bfloat16 that are worth it. A compiler that makes code for this very processor cannot be
 * told otherwise by -U: its own headers define the name anew. */
#if defined(__AVX512BF16__) && !defined(KUN_SLOW_BF16)
#define HAS_BF16
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")
#define LANES 16

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef float vf_u __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t vi_u __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint16_t words __attribute__((vector_size(64)));
typedef int16_t signed_words __attribute__((vector_size(64)));
typedef int32_t quarter __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t half_u __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint8_t bytes_u __attribute__((vector_size(16), aligned(1), may_alias));
typedef int8_t chars_u __attribute__((vector_size(16), aligned(1), may_alias));

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
/* A vector's halves. What is not lane by lane gcc computes element by element, unless it is told how
 * it is done with each half. */
#define HAS_HALVES
typedef union {
  vf all;
  vi bits;
  __m256 of[2];
  __m256i bits_of[2];
} halves;
#define EACH_HALF(result, ...)                                    \
  halves result;                                                  \
  UNROLL for (int h = 0; h < 2; h++) result.of[h] = (__VA_ARGS__)
#endif

INLINE vf splat(float x) { return x - (vf){}; }
INLINE vf load_f32(const float *p) { return *(const vf_u *)p; }
INLINE void store_f32(float *p, vf v) { *(vf_u *)p = v; }

INLINE vf load_part_f32(const float *p, int count) {
  vf v = {};
  memcpy(&v, p, (size_t)count * 4);
  return v;
}
INLINE void store_part_f32(float *p, vf v, int count) { memcpy(p, &v, (size_t)count * 4); }

/* bfloat16 <-> float, round to nearest even. */
INLINE vf widen(half_u h) {
#ifdef __AVX512F__
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#elif defined(HAS_HALVES)
  __m128i words[2];
  memcpy(words, &h, sizeof h);
  EACH_HALF(wide, (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(words[h]), 16));
  return wide.all;
#else
  vi wide;
  for (int i = 0; i < LANES; i++) wide[i] = (int32_t)((uint32_t)h[i] << 16);
  return (vf)wide;
#endif
}
INLINE half_u narrow(vf v) {
#ifdef HAS_BF16
  return (half_u)_mm512_cvtneps_pbh((__m512)v);
#else
  vi bits = (vi)v;
  bits += 0x7fff + ((bits >> 16) & 1);
#ifdef HAS_HALVES
  halves of = {.bits = bits};
  __m256i low = _mm256_srli_epi32(of.bits_of[0], 16), high = _mm256_srli_epi32(of.bits_of[1], 16);
  return (half_u)_mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
#endif
  half_u h;
  for (int i = 0; i < LANES; i++) h[i] = (uint16_t)((uint32_t)bits[i] >> 16);
  return h;
#endif
}
INLINE vf load_bf16(const uint16_t *p) { return widen(*(const half_u *)p); }
INLINE void store_bf16(uint16_t *p, vf v) { *(half_u *)p = narrow(v); }
INLINE vf load_part_bf16(const uint16_t *p, int count) {
  half_u h = {};
  memcpy(&h, p, (size_t)count * 2);
  return widen(h);
}
INLINE void store_part_bf16(uint16_t *p, vf v, int count) {
  half_u h = narrow(v);
  memcpy(p, &h, (size_t)count * 2);
}

/* float16 -> float, exact. */
INLINE vf widen_f16(half_u h) {
#ifdef __AVX512F__
  return (vf)_mm512_cvtph_ps((__m256i)h);
#else
  vi wide = __builtin_convertvector(h, vi);
  vf size = (vf)((wide & 0x7fff) << 13) * 0x1p112f;
  return (vf)((vi)size | (wide & 0x8000) << 16);
#endif
}
INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }
INLINE vi widen_bytes(const uint8_t *p) {
#ifdef __AVX512F__ /* gcc 12 converts lane by lane */
  return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#else
  return __builtin_convertvector(*(const bytes_u *)p, vi);
#endif
}
INLINE vi widen_signed(const int8_t *p) {
#ifdef __AVX512F__
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#else
  return __builtin_convertvector(*(const chars_u *)p, vi);
#endif
}
/* The lowest byte of each lane. */
INLINE void store_bytes(int8_t *p, vi v) {
#ifdef __AVX512F__
  _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)v));
#else
  for (int i = 0; i < LANES; i++) p[i] = (int8_t)v[i];
#endif
}

/* The 16 bytes at p in each quarter of the vector. */
INLINE vi spread_16_bytes(const void *p) {
#ifdef __AVX512F__
  return (vi)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
#else
  quarter q = *(const quarter *)p;
  return (vi){q[0], q[1], q[2], q[3], q[0], q[1], q[2], q[3],
              q[0], q[1], q[2], q[3], q[0], q[1], q[2], q[3]};
#endif
}
/* The 4 bytes at p in each lane. */
INLINE vi spread_4_bytes(const void *p) {
  int32_t x;
  memcpy(&x, p, 4);
  return x - (vi){};
}

/* acc + a * b, lane by lane; a bf16 lane holds two products. */
INLINE vf dot_f32(vf acc, vi a, vi b) {
#ifdef __AVX512F__
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)acc);
#else
  return acc + (vf)a * (vf)b;
#endif
}
INLINE vf dot_bf16(vf acc, vi a, vi b) {
#ifdef HAS_BF16
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  acc = dot_f32(acc, a & (int32_t)0xffff0000, b & (int32_t)0xffff0000);
  return dot_f32(acc, a << 16, b << 16);
#endif
}

/* The sum of each lane's two products of signed words. */
#ifdef __AVX2__
INLINE vi dot_words(vi a, vi b) {
#ifdef __AVX512BW__
  return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
  union {
    vi all;
    __m256i halves[2];
  } left = {a}, right = {b};
  left.halves[0] = _mm256_madd_epi16(left.halves[0], right.halves[0]);
  left.halves[1] = _mm256_madd_epi16(left.halves[1], right.halves[1]);
  return left.all;
#endif
}
#endif

/* acc + the four products of each lane's unsigned bytes (of w) and signed ones (of x). */
INLINE vi dot_bytes(vi acc, vi w, vi x) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(__AVX2__) /* even bytes, then odd ones, as words */
  acc += dot_words(w & 0x00ff00ff, (vi)((signed_words)x << 8 >> 8));
  return acc + dot_words((vi)((words)w >> 8), (vi)((signed_words)x >> 8));
#else
  UNROLL for (int byte = 0; byte < 4; byte++) {
    acc += (w >> 8 * byte & 0xff) * (x << (24 - 8 * byte) >> 24);
  }
  return acc;
#endif
}

INLINE vf max_vf(vf a, vf b) {
#ifdef __AVX512F__
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(HAS_HALVES)
  halves left = {a}, right = {b};
  EACH_HALF(larger, _mm256_max_ps(left.of[h], right.of[h]));
  return larger.all;
#else
  vi greater = a > b;
  return (vf)((greater & (vi)a) | (~greater & (vi)b));
#endif
}
INLINE vf min_vf(vf a, vf b) {
#ifdef __AVX512F__
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(HAS_HALVES)
  halves left = {a}, right = {b};
  EACH_HALF(smaller, _mm256_min_ps(left.of[h], right.of[h]));
  return smaller.all;
#else
  vi less = a < b;
  return (vf)((less & (vi)a) | (~less & (vi)b));
#endif
}
/* Where the mask lane is all ones, a, else b. */
INLINE vf choose(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

/* Whether all lanes are all ones, as a comparison that holds leaves them. */
INLINE int all_hold(vi v) {
#ifdef __AVX512F__
  return _mm512_cmpneq_epi32_mask((__m512i)v, _mm512_set1_epi32(-1)) == 0;
#else
  int hold = -1;
  for (int i = 0; i < LANES; i++) hold &= v[i];
  return hold == -1;
#endif
}

/* The lower halves of a and b side by side, and their upper halves. */
INLINE vf join_low(vf a, vf b) {
  return (vf)SHUFFLE((vi)a, (vi)b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
}
INLINE vf join_high(vf a, vf b) {
  return (vf)SHUFFLE((vi)a, (vi)b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

/* Lanes swapped with those `half` away. */
INLINE vf fold(vf v, int half) {
#ifdef HAS_HALVES
  halves of = {v}, folded = {v};
  UNROLL for (int h = 0; h < 2; h++) {
    if (half == 8) folded.of[h] = of.of[1 - h];
    else if (half == 4) folded.of[h] = _mm256_permute2f128_ps(of.of[h], of.of[h], 1);
    else if (half == 2) folded.of[h] = _mm256_permute_ps(of.of[h], 0x4e);
    else folded.of[h] = _mm256_permute_ps(of.of[h], 0xb1);
  }
  return folded.all;
#endif
  switch (half) {
    case 8: return (vf)SHUFFLE((vi)v, (vi)v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    case 4: return (vf)SHUFFLE((vi)v, (vi)v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    case 2: return (vf)SHUFFLE((vi)v, (vi)v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    default: return (vf)SHUFFLE((vi)v, (vi)v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  }
}
/* Sum and maximum over the lanes, in one fixed order. */
INLINE float sum_lanes(vf v) {
  v += fold(v, 8);
  v += fold(v, 4);
  v += fold(v, 2);
  v += fold(v, 1);
  return v[0];
}
INLINE float max_lanes(vf v) {
  v = max_vf(v, fold(v, 8));
  v = max_vf(v, fold(v, 4));
  v = max_vf(v, fold(v, 2));
  v = max_vf(v, fold(v, 1));
  return v[0];
}

INLINE vi larger_of(vi a, vi b) {
#ifdef __AVX512F__
  return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
  vi larger = a > b;
  return (larger & a) | (~larger & b);
#endif
}

/* The largest of numbers that are not negative. A NaN is larger than all others. */
INLINE float largest_bits(vi v) {
  for (int half = 8; half > 0; half /= 2) {
    v = larger_of(v, (vi)fold((vf)v, half));
  }
  return ((vf)v)[0];
}

#endif
