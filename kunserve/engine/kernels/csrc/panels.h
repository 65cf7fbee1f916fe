/* Quantised weights in packed panels, and the one way in which they are multiplied.
 *
 * A matrix is a run of panels of 16 rows, a panel is its scales, padded to 64 bytes, and then its
 * values, block after block of 32 columns. A vector of values has 4 columns of each of the 16 rows:
 * step s (of 8) of a block has columns 4 s .. 4 s + 3. Values are unsigned.
 *
 *   format  values of a block                          scales of a panel
 *   Q8_0    8 vectors; 128 stands for 0                [block] 16 halves
 *   Q4_0    4 vectors; step s low, s + 4 high nibbles  [block] 16 halves; 8 stands for 0
 *   Q4_1    the same                                   [block] 16 scales, 16 minima (halves)
 *   INT8    as Q8_0                                    16 floats, one per row
 *   Q4_K    as Q4_1                                    [8 blocks] 16 + 16 halves, then [block] 16
 *                                                      scales, 16 minima (bytes)
 *   Q6_K    as Q4_0, then 2 vectors of high bits, two  [8 blocks] 16 halves, then [block] 2 x 16
 *           per step; 32 stands for 0                  signed bytes, for 16 columns each
 *
 * Rows of x are rounded to 8 bits, a block of 32 at a time and each by itself. Products are summed
 * as integers, which is exact in any order; a block's sum is scaled and added to those of earlier
 * blocks as floats, in their order. So an output is the same bits whoever shares its batch. */
#ifndef KUN_PANELS_H
#define KUN_PANELS_H

#include "vec.h"

#define BLOCK 32 /* columns that share a scale of x */
#ifdef __AVX512F__
#define PACKED_ROWS 12 /* rows of x that share a pass: their sums stay in registers */
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
  int32_t unused[3];
} x_block;

long panel_bytes(int format, long blocks);

/* out[i] = the 16 dot products of x's row i with a panel, for i < rows <= PACKED_ROWS; `stride` is
 * that of x's rows, in blocks. `fetches` says whether to fetch what lies behind. */
void packed_tile(int format, int rows, vf *out, const char *panel, const x_block *x, long stride,
                 long blocks, int fetches);

/* 32 columns of one row of a panel. */
void unpack_block(int format, float *out, const char *panel, int row, long block, long blocks);

#endif
