/* AMX's tile registers, for the kernels that are compiled with KUN_AMX: 8 tiles of up to 16 rows of
 * 64 bytes. A thread says how high they are before it uses them and gives them back after each job,
 * else every change of threads would save 8 KiB. Linux lets a process use them once it asks. */
#ifndef KUN_AMX_H
#define KUN_AMX_H

#include <stddef.h>
#include <stdint.h>

#define AMX_HEIGHT 16
#define AMX_ROW_BYTES 64

/* Ask Linux for the tiles; 0, or why it refuses (an errno). Without KUN_AMX there is nothing to
 * ask. */
int32_t kun_allow_amx(void);

#ifdef KUN_AMX

#ifdef KUN_AMX_INSTRUCTIONS
#include KUN_AMX_INSTRUCTIONS /* the tests' own, in C */
#else
#include <immintrin.h>
#endif

/* Tile AMX_PANEL_TILE has 16 rows from now on in this thread, all others `height`. */
void amx_shape(int height);
/* For blocks of packed weights: it has AMX_BYTE_STEPS rows, others 16, tiles A of as many times 4
 * bytes. */
#define AMX_BYTE_STEPS 8
void amx_shape_of_bytes(void);
/* Memory of this thread, until its next call. */
void *amx_scratch(size_t bytes);
/* At the end of a job. */
void amx_release(void);
/* At the end of a thread. */
void amx_forget(void);

#define AMX_PANEL_TILE 4

/* The compiler does not know that a tile is loaded from memory. */
#define AMX_LOAD(tile, at, stride)     \
  do {                                 \
    __asm__ volatile("" ::: "memory"); \
    _tile_loadd(tile, at, stride);     \
  } while (0)

#else

static inline void amx_release(void) {}
static inline void amx_forget(void) {}

#endif
#endif
