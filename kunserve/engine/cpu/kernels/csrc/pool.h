/* The worker threads: one job at a time, run by the caller and `threads - 1` workers. */
#ifndef KUN_POOL_H
#define KUN_POOL_H

#include <stddef.h>

typedef void (*job_fn)(void *arg, int thread);

/* Threads per job from now on, the caller included; 1 keeps no worker alive. 0 if it failed. */
int kun_set_threads(int threads);
int kun_threads(void);

void pool_run(job_fn fn, void *arg);
/* Inside a job: wait for every thread, then start a fresh count for `pool_take`. */
void pool_barrier(void);
/* The same, and before any thread goes on the last one calls `alone`. */
void pool_barrier_around(void (*alone)(void *), void *arg);
/* Inside a job: the next piece of work, 0, 1, 2, ... since the last barrier. */
long pool_take(void);
/* Memory that belongs to this thread, 64-byte aligned, valid until its next call. */
void *pool_scratch(int thread, size_t bytes);
/* Memory that all threads of a job share, for each use of its own, from one thread's call on; valid
 * until one calls for more. */
enum { POOL_ATTENTION, POOL_FACTORS, POOL_USES };
void *pool_shared(int use, size_t bytes);

#endif
