/* Included by bf16.c and f32.c, which define KUN_BF16 or not: names and loads of the element. */
#include "api.h"
#include "pieces.h"
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
#ifdef KUN_BF16
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
