"""Kernels in Triton, and nothing else: the only room that imports it."""
