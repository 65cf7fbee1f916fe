"""The device's operations as kernels in Triton, and graphs: the only room that imports it."""
