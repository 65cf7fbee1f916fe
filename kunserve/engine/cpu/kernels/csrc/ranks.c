/* Barriers between processes: as those of pool.c, but each wait has an end, because a process that
 * has died arrives nowhere. */
#define _GNU_SOURCE
#include "ranks.h"

#include "pool.h"
#include "spin.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Shared by all ranks. A rank that waits looks again so often for one that is lost. */
#define SLICE_NS 50000000L

typedef struct {
  _Alignas(128) atomic_int phase; /* counts meetings */
  _Alignas(128) atomic_int phase_sleepers;
  _Alignas(128) atomic_int arrived;
  _Alignas(128) atomic_int command; /* counts commands */
  _Alignas(128) atomic_int command_sleepers;
  _Alignas(128) atomic_int lost;
  _Alignas(128) _Atomic(int64_t) woken_ns; /* when sleepers were last woken */
} meeting;

int64_t kun_ranks_meeting_bytes(void) { return (int64_t)sizeof(meeting); }

/* Of this process. A rank that waits for a command has nothing to do for long. */
static spinner at_meeting = {.most_ns = 20000000};
static spinner for_command = {.most_ns = 2000000};

static void wake_all(atomic_int *word) {
  /* Not a private futex: those who sleep are other processes. */
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void advance(meeting *m, atomic_int *word, atomic_int *sleepers) {
  atomic_fetch_add(word, 1);
  if (atomic_load(sleepers) == 0) return;
  atomic_store(&m->woken_ns, now_ns());
  wake_all(word);
}

/* Whether the word has changed before so many nanoseconds were over, and before a rank was lost. */
static int await_change(meeting *m, atomic_int *word, int value, atomic_int *sleepers, spinner *s,
                        int64_t patience_ns) {
  if (spin_while(s, word, value)) return 1;
  int64_t end = now_ns() + patience_ns;
  while (atomic_load_explicit(word, memory_order_acquire) == value) {
    int64_t begin = now_ns(), left = end - begin;
    if (left <= 0 || atomic_load(&m->lost)) return 0;
    if (left > SLICE_NS) left = SLICE_NS;
    struct timespec slice = {left / 1000000000L, left % 1000000000L};
    atomic_fetch_add(sleepers, 1);
    syscall(SYS_futex, word, FUTEX_WAIT, value, &slice, NULL, 0);
    atomic_fetch_sub(sleepers, 1);
    int64_t woken = atomic_load(&m->woken_ns);
    if (woken > begin) learn_wake(s, now_ns() - woken);
  }
  return 1;
}

void kun_ranks_lose(kun_ranks *ranks) {
  meeting *m = ranks->meeting;
  ranks->lost = 1;
  atomic_store(&m->lost, 1);
  wake_all(&m->phase);
  wake_all(&m->command);
}

void kun_ranks_meet(kun_ranks *ranks) {
  meeting *m = ranks->meeting;
  if (ranks->lost) return;
  int phase = atomic_load(&m->phase);
  if (atomic_fetch_add(&m->arrived, 1) == ranks->size - 1) {
    atomic_store(&m->arrived, 0);
    advance(m, &m->phase, &m->phase_sleepers);
  } else if (!await_change(m, &m->phase, phase, &m->phase_sleepers, &at_meeting,
                           ranks->patience_ns)) {
    kun_ranks_lose(ranks);
  }
}

static void meet(void *ranks) { kun_ranks_meet(ranks); }

void ranks_barrier(kun_ranks *ranks) {
  if (ranks == NULL) pool_barrier();
  else pool_barrier_around(meet, ranks);
}

void kun_ranks_tell(kun_ranks *ranks) {
  meeting *m = ranks->meeting;
  advance(m, &m->command, &m->command_sleepers);
}

int32_t kun_ranks_wait(kun_ranks *ranks, int32_t seen, int64_t milliseconds) {
  meeting *m = ranks->meeting;
  await_change(m, &m->command, seen, &m->command_sleepers, &for_command, milliseconds * 1000000L);
  if (atomic_load(&m->lost)) ranks->lost = 1;
  return atomic_load(&m->command);
}
