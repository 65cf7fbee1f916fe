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
#define SHAPES(h) \
  {1, 0, {0}, {WIDE, WIDE, WIDE, WIDE, WIDE, WIDE, WIDE}, {h, h, h, h, AMX_HEIGHT, h, h}}
static const tile_shapes shapes[AMX_HEIGHT] = {
    SHAPES(1), SHAPES(2),  SHAPES(3),  SHAPES(4),  SHAPES(5),  SHAPES(6),  SHAPES(7),  SHAPES(8),
    SHAPES(9), SHAPES(10), SHAPES(11), SHAPES(12), SHAPES(13), SHAPES(14), SHAPES(15), SHAPES(16)};

static _Thread_local int shaped; /* the height; 0 before the first use and after a release */

void amx_shape(int height) {
  if (shaped == height) return; /* a change takes about as long as ten products of tiles */
  _tile_loadconfig(&shapes[height - 1]);
  shaped = height;
}

void amx_release(void) {
  if (shaped == 0) return;
  _tile_release();
  shaped = 0;
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
