/* What this machine can do at most. `python -m benchmarks.compute.kernels` holds the kernels against it. */
#include "pieces.h"
#include "pool.h"

/* As many sums as registers allow beside two operands: then neither latency nor loads count. */
#ifdef __AVX512F__
#define SUMS 24
#elif PIECE < LANES
#define SUMS 12
#else
#define SUMS 4
#endif
enum { DOTS_BF16 = 0, DOTS_F32 = 1, DOTS_BYTES = 2 };

typedef struct {
  int kind;
  long rounds;
} dots_job;

static volatile float sink; /* so that nothing is left out */

INLINE pi dots_of(const int kind, long rounds) {
  pi acc[SUMS], start[SUMS] = {}, a = {}, b = {}, all = {};
  __asm__ volatile("" : "+m"(a), "+m"(b), "+m"(start)); /* else all sums would be one */
  UNROLL for (int i = 0; i < SUMS; i++) acc[i] = start[i];
  for (long round = 0; round < rounds; round++) {
#if PIECE < LANES
    __asm__ volatile("" : "+x"(a)); /* else the products of bytes would be made once */
#endif
    UNROLL for (int i = 0; i < SUMS; i++) {
      if (kind == DOTS_BF16) acc[i] = (pi)piece_dot_bf16((pf)acc[i], a, b);
      else if (kind == DOTS_F32) acc[i] = (pi)piece_dot_f32((pf)acc[i], a, b);
      else acc[i] = piece_dot_bytes(acc[i], a, b);
    }
  }
  UNROLL for (int i = 0; i < SUMS; i++) all |= acc[i];
  return all;
}

static void dots_fn(void *arg, int thread) {
  const dots_job *job = arg;
  pi all;
  (void)thread;
  switch (job->kind) {
    case DOTS_BF16: all = dots_of(DOTS_BF16, job->rounds); break;
    case DOTS_F32: all = dots_of(DOTS_F32, job->rounds); break;
    default: all = dots_of(DOTS_BYTES, job->rounds);
  }
  sink = (float)all[0];
}

/* Products of registers alone, on every thread; how many multiply-adds that were. */
int64_t kun_peak_dots(int32_t kind, int64_t rounds) {
  dots_job job = {kind, rounds};
  pool_run(dots_fn, &job);
  return rounds * SUMS * PIECE * (kind == DOTS_BF16 ? 2 : kind == DOTS_F32 ? 1 : 4) * kun_threads();
}

typedef struct {
  const char *at;
  long bytes, ahead;
} read_job;

#define READ_PIECE (64 * 1024)

static void read_fn(void *arg, int thread) {
  const read_job *job = arg;
  vi sum[4] = {};
  (void)thread;
  for (long from = pool_take() * READ_PIECE; from < job->bytes; from = pool_take() * READ_PIECE) {
    long end = from + READ_PIECE < job->bytes ? from + READ_PIECE : job->bytes;
    for (long at = from; at + 256 <= end; at += 256) {
      UNROLL for (int i = 0; i < 4; i++) {
        if (job->ahead > 0) __builtin_prefetch(job->at + at + i * 64 + job->ahead, 0, 2);
        sum[i] ^= *(const vi_u *)(job->at + at + i * 64);
      }
    }
  }
  sink = (float)(sum[0] ^ sum[1] ^ sum[2] ^ sum[3])[0];
}

/* Read memory in order, fetching `ahead` bytes before they are read, or leaving that to the
 * processor. */
void kun_read(const void *memory, int64_t bytes, int64_t ahead) {
  read_job job = {memory, bytes, ahead};
  pool_run(read_fn, &job);
}
