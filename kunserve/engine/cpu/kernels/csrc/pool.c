/* A pool of our own rather than OpenMP's: torch bundles a libgomp whose workers spin between
 * regions, and two runtimes in one process fight for the cores. This one parks in a futex after a
 * short spin (spin.h), keeps no thread when one is asked for, and needs nothing from the environment. */
#define _GNU_SOURCE
#include "pool.h"

#include "amx.h"
#include "spin.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

/* glibc 2.34 gave these two a new name beside their old one. By the old one a library that was
 * linked with a new glibc runs with any. */
#ifdef __GLIBC__
#if defined(__x86_64__)
#define FIRST_GLIBC "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define FIRST_GLIBC "GLIBC_2.17"
#endif
#endif
#ifdef FIRST_GLIBC
__asm__(".symver pthread_create, pthread_create@" FIRST_GLIBC);
__asm__(".symver pthread_join, pthread_join@" FIRST_GLIBC);
#endif

#define MAX_THREADS 256

typedef struct {
  _Alignas(128) atomic_int generation; /* counts jobs; workers wait for it to change */
  _Alignas(128) atomic_int sleepers;
  _Alignas(128) atomic_int arrived;
  _Alignas(128) atomic_int phase; /* counts barriers */
  _Alignas(128) atomic_int phase_sleepers;
  _Alignas(128) _Atomic(int64_t) woken_ns; /* when sleepers were last woken */
  _Alignas(128) atomic_long next;
  _Alignas(128) job_fn fn;
  void *arg;
  int threads;
  int stopping;
} pool_state;

static pool_state pool = {.threads = 1};
static pthread_t workers[MAX_THREADS];
static pthread_mutex_t running = PTHREAD_MUTEX_INITIALIZER;
static struct {
  _Alignas(128) void *memory;
  size_t bytes;
} scratch[MAX_THREADS + POOL_USES]; /* the last ones are shared */
static spinner idle = {.most_ns = 2000000};
static spinner at_barrier = {.most_ns = 20000000}; /* others compute: longer than their slices */

static void wait_while(atomic_int *word, int value, atomic_int *sleeping, spinner *s) {
  if (spin_while(s, word, value)) return;
  while (atomic_load_explicit(word, memory_order_acquire) == value) {
    int64_t begin = now_ns();
    atomic_fetch_add(sleeping, 1);
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
    atomic_fetch_sub(sleeping, 1);
    int64_t woken = atomic_load(&pool.woken_ns);
    if (woken > begin) learn_wake(s, now_ns() - woken);
  }
}

static void advance(atomic_int *word, atomic_int *sleeping) {
  atomic_fetch_add(word, 1);
  if (atomic_load(sleeping) > 0) {
    atomic_store(&pool.woken_ns, now_ns());
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
  }
}

void pool_barrier(void) { pool_barrier_around(NULL, NULL); }

void pool_barrier_around(void (*alone)(void *), void *arg) {
  if (pool.threads == 1) {
    if (alone != NULL) alone(arg);
    atomic_store_explicit(&pool.next, 0, memory_order_relaxed);
    return;
  }
  int phase = atomic_load(&pool.phase);
  if (atomic_fetch_add(&pool.arrived, 1) == pool.threads - 1) {
    if (alone != NULL) alone(arg);
    atomic_store(&pool.arrived, 0);
    atomic_store(&pool.next, 0);
    advance(&pool.phase, &pool.phase_sleepers);
  } else {
    wait_while(&pool.phase, phase, &pool.phase_sleepers, &at_barrier);
  }
}

long pool_take(void) {
  if (pool.threads == 1) {
    long taken = atomic_load_explicit(&pool.next, memory_order_relaxed);
    atomic_store_explicit(&pool.next, taken + 1, memory_order_relaxed);
    return taken;
  }
  return atomic_fetch_add_explicit(&pool.next, 1, memory_order_relaxed);
}

static void *work(void *arg) {
  int thread = (int)(long)arg;
  int seen = 0;
  for (;;) {
    wait_while(&pool.generation, seen, &pool.sleepers, &idle);
    seen++;
    if (pool.stopping) {
      amx_forget();
      return NULL;
    }
    pool.fn(pool.arg, thread);
    amx_release();
    pool_barrier();
  }
}

void pool_run(job_fn fn, void *arg) {
  pthread_mutex_lock(&running);
  atomic_store(&pool.next, 0);
  pool.fn = fn;
  pool.arg = arg;
  if (pool.threads > 1) advance(&pool.generation, &pool.sleepers);
  fn(arg, 0);
  amx_release();
  pool_barrier();
  pthread_mutex_unlock(&running);
}

void *pool_scratch(int thread, size_t bytes) {
  if (scratch[thread].bytes < bytes) {
    free(scratch[thread].memory);
    bytes = (bytes + 4095) / 4096 * 4096;
    scratch[thread].memory = aligned_alloc(4096, bytes);
    scratch[thread].bytes = bytes;
    if (scratch[thread].memory == NULL) abort();
  }
  return scratch[thread].memory;
}

void *pool_shared(int use, size_t bytes) { return pool_scratch(MAX_THREADS + use, bytes); }

/* In a child of fork() no worker exists, and a caller may have held the lock. */
static void forget_workers(void) {
  pool.threads = 1;
  atomic_store(&pool.sleepers, 0);
  atomic_store(&pool.arrived, 0);
  atomic_store(&pool.phase_sleepers, 0);
  pthread_mutex_init(&running, NULL);
}

__attribute__((constructor)) static void watch_forks(void) {
  pthread_atfork(NULL, NULL, forget_workers);
}

int kun_set_threads(int threads) {
  if (threads < 1 || threads > MAX_THREADS) return 0;
  pthread_mutex_lock(&running);
  if (threads != pool.threads) {
    pool.stopping = 1;
    advance(&pool.generation, &pool.sleepers);
    for (int i = 1; i < pool.threads; i++) pthread_join(workers[i], NULL);
    pool.stopping = 0;
    atomic_store(&pool.generation, 0);
    pool.threads = 1;
    for (int i = 1; i < threads; i++) {
      if (pthread_create(&workers[i], NULL, work, (void *)(long)i) != 0) break;
      pool.threads = i + 1;
    }
  }
  int got = pool.threads;
  pthread_mutex_unlock(&running);
  return got == threads;
}

int kun_threads(void) { return pool.threads; }
