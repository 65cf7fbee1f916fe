"""The device's operations as kernels in Triton: the only room that imports it."""
