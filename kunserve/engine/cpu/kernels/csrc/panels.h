/* Quantised weights in packed panels, and the one way in which they are multiplied.
 *
 * A matrix is a run of panels of 16 rows, a panel is its blocks of 32 columns with their scales, in
 * the order in which they are read: one run of memory, which the processor fetches by itself. A line
 * of scales (64 bytes) stands before the values of the blocks that share it. A vector of values has
 * 4 columns of each of the 16 rows: step s (of 8) of a block has columns 4 s .. 4 s + 3. Values are
 * unsigned.
 *
 *   format  values of a block                          scales
 *   Q8_0    8 vectors; 128 stands for 0                2 blocks: 16 halves each
 *   Q4_0    4 vectors; step s low, s + 4 high nibbles  the same; 8 stands for 0
 *   Q4_1    the same                                   1 block: 16 scales, 16 minima (halves)
 *   INT8    as Q8_0                                    the panel: 16 floats
 *   Q4_K    as Q4_1                                    8 blocks: 16 + 16 halves; and of these
 *                                                      2 blocks: 16 scales, 16 minima (bytes) each
 *   Q6_K    as Q4_0, then 2 vectors of high bits, two  16 blocks: 16 halves for 8 each; and of these
 *           per step; 32 stands for 0                  2 blocks: 2 x 16 signed bytes each, of which
 *                                                      16 are for 16 columns
 *
 * Rows of x are rounded to 8 bits, a block of 32 at a time and each by itself. Products are summed
 * as integers, which is exact in any order; a block's sum is scaled and added to those of earlier
 * blocks as floats, in their order. So an output is the same bits whoever shares its batch. */
#ifndef KUN_PANELS_H
#define KUN_PANELS_H

#include "amx.h"
#include "vec.h"

#define BLOCK 32 /* columns that share a scale of x */
#ifdef __AVX512F__
#define PACKED_ROWS 9 /* rows of x that share a pass: their sums stay in registers */
#else
#define PACKED_ROWS 4
#endif

/* One block of a row of x, in one cache line. */
typedef struct {
  int8_t values[BLOCK];
  float scale;
  int32_t from_128;    /* -128 times the sum of the values */
  float sum;           /* the sum of the values, scaled */
  int32_t from_32[2];  /* -32 times the sum of each half */
  int32_t from_8;      /* -8 times the sum of the values */
  int32_t unused[2];
} x_block;

long panel_bytes(int format, long blocks);

/* out[i] = the 16 dot products of x's row i with a panel, for i < rows <= PACKED_ROWS; `stride` is
 * that of x's rows, in blocks. `fetches` says whether to fetch what lies behind. */
void packed_tile(int format, int rows, vf *out, const char *panel, const x_block *x, long stride,
                 long blocks, int fetches);

#ifdef KUN_AMX
/* The same for AMX_HEIGHT rows, by tiles. */
void packed_tile_by_amx(int format, vf *out, const char *panel, const x_block *x, long stride,
                        long blocks, int fetches);
#endif

/* One row of a panel. */
void unpack_row(int format, float *out, const char *panel, int row, long blocks);

#endif
