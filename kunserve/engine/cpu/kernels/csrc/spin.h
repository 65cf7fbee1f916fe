/* How long a thread that waits spins before it parks: as long as to be woken takes, as measured. On a
 * quiet machine that is nothing, and who needs the core gets it. Beside work of low priority a woken
 * thread may wait for the end of a slice, and to spin is cheaper. Beside work of a like priority it
 * would only use up its own share: who loses the core often while it spins does without. */
#ifndef KUN_SPIN_H
#define KUN_SPIN_H

#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#define LEAST_SPIN_NS 50000
#define SLOW_WAKE_NS 200000 /* a quiet machine takes a quarter of it */
#define OFTEN 4             /* lost for more than a share of 1 / OFTEN */
#define WITHOUT_NS 1000000000
#define CHECKED_PAUSES 32   /* so often the clock is read: each 1 or 2 us */

typedef struct {
  _Alignas(128) _Atomic(int64_t) ns; /* 0 at first */
  _Atomic(int64_t) spun_ns, lost_ns, without_until_ns;
  int64_t most_ns;
} spinner;

static inline void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static inline int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000L + now.tv_nsec;
}

#define GET(field) atomic_load_explicit(&s->field, memory_order_relaxed)
#define SET(field, value) atomic_store_explicit(&s->field, value, memory_order_relaxed)

/* The core was lost for so long: whether that is too often. */
static inline int is_contested(spinner *s, int64_t now, int64_t lost_ns) {
  SET(lost_ns, GET(lost_ns) + lost_ns);
  if (GET(lost_ns) * OFTEN < GET(spun_ns)) return 0;
  SET(without_until_ns, now + WITHOUT_NS);
  SET(spun_ns, 0);
  SET(lost_ns, 0);
  return 1;
}

/* Whether the word has changed before it is time to park. */
static inline int spin_while(spinner *s, atomic_int *word, int value) {
  int64_t begin = now_ns(), last = begin, ns = GET(ns);
  int has_changed = 0;
  if (ns < LEAST_SPIN_NS) ns = LEAST_SPIN_NS;
  while (!has_changed && last - begin <= ns) {
    for (int i = 0; i < CHECKED_PAUSES && !has_changed; i++) {
      has_changed = atomic_load_explicit(word, memory_order_acquire) != value;
      relax();
    }
    int64_t now = now_ns();
    if (now - last > SLOW_WAKE_NS) ns = is_contested(s, now, now - last) ? 0 : ns;
    last = now;
  }
  /* A little less each time, so that what to be woken takes is measured again. */
  if (last - begin > LEAST_SPIN_NS) {
    SET(ns, ns - ns / 16);
    SET(spun_ns, GET(spun_ns) + last - begin);
  }
  return has_changed;
}

/* After a park that ended `late_ns` after the call that ended it. */
static inline void learn_wake(spinner *s, int64_t late_ns) {
  if (late_ns < SLOW_WAKE_NS || now_ns() < GET(without_until_ns)) return;
  SET(ns, 2 * late_ns < s->most_ns ? 2 * late_ns : s->most_ns);
}

#undef GET
#undef SET
#endif
