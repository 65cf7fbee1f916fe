#define _GNU_SOURCE
#include "amx.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef KUN_AMX

/* As LDTILECFG reads it. */
typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} tile_shapes;
_Static_assert(sizeof(tile_shapes) == 64, "LDTILECFG reads 64 bytes");

#define WIDE AMX_ROW_BYTES
/* Tiles A and C of `h` rows; `steps` rows of tile B, and as many times 4 bytes of A. */
#define SHAPES(h, steps)                                                                 \
  {1, 0, {0}, {WIDE, WIDE, WIDE, WIDE, WIDE, 4 * (steps), 4 * (steps)}, {h, h, h, h, steps, h, h}}
#define OF_WORDS(h) SHAPES(h, AMX_HEIGHT)
static const tile_shapes shapes[AMX_HEIGHT + 1] = {
    SHAPES(AMX_HEIGHT, AMX_BYTE_STEPS),
    OF_WORDS(1), OF_WORDS(2),  OF_WORDS(3),  OF_WORDS(4),  OF_WORDS(5),  OF_WORDS(6),
    OF_WORDS(7), OF_WORDS(8),  OF_WORDS(9),  OF_WORDS(10), OF_WORDS(11), OF_WORDS(12),
    OF_WORDS(13), OF_WORDS(14), OF_WORDS(15), OF_WORDS(16)};

#define NONE (-1)
static _Thread_local int shaped = NONE; /* which of them, or none at first and after a release */

static void take_shape(int which) {
  if (shaped == which) return; /* a change takes about as long as ten products of tiles */
  _tile_loadconfig(&shapes[which]);
  shaped = which;
}

void amx_shape(int height) { take_shape(height); }

void amx_shape_of_bytes(void) { take_shape(0); }

void amx_release(void) {
  if (shaped == NONE) return;
  _tile_release();
  shaped = NONE;
}

static _Thread_local struct {
  void *memory;
  size_t bytes;
} scratch;

void *amx_scratch(size_t bytes) {
  if (scratch.bytes < bytes) {
    free(scratch.memory);
    scratch.bytes = (bytes + 4095) / 4096 * 4096;
    scratch.memory = aligned_alloc(4096, scratch.bytes);
    if (scratch.memory == NULL) abort();
  }
  return scratch.memory;
}

void amx_forget(void) {
  free(scratch.memory);
  scratch.memory = NULL;
  scratch.bytes = 0;
}

#endif

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

int32_t kun_allow_amx(void) {
#if defined(KUN_AMX) && !defined(KUN_AMX_INSTRUCTIONS)
  if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) != 0) return errno;
#endif
  return 0;
}
