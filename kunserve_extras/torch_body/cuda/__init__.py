"""Device memory by the CUDA driver: the only room that knows libcuda."""
