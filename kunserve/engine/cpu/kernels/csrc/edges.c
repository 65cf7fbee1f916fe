/* What a step does before its first layer. One call each, because after a step's kernels every
 * other function is cold: a few array operations take a hundred times as long as what they do. */
#include <stdint.h>

/* The lowest and the highest block table entry that a step touches; the other way round if none. */
void kun_entry_bounds(const int32_t *tables, const int32_t *rows, const int32_t *context_lens,
                      int64_t seqs, int64_t max_blocks, int64_t block_size, int32_t *bounds) {
  int32_t low = INT32_MAX, high = INT32_MIN;
  for (int64_t s = 0; s < seqs; s++) {
    const int32_t *table = tables + rows[s] * max_blocks;
    int64_t blocks = (context_lens[s] + block_size - 1) / block_size;
    if (blocks > max_blocks) blocks = max_blocks;
    for (int64_t b = 0; b < blocks; b++) {
      low = table[b] < low ? table[b] : low;
      high = table[b] > high ? table[b] : high;
    }
  }
  bounds[0] = low;
  bounds[1] = high;
}
