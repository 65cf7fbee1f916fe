"""The C kernels: linear, norm, rotary, paged attention and whole stages, bit-identical per row.

A row's result depends on nothing but its own inputs: not on the batch, the chunking of a prompt,
the block size or the number of threads. That is what makes greedy output repeatable under any
schedule, so every kernel's tests check it bit by bit.
"""
