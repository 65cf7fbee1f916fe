"""The real body: memory, weights, kernels, sampling. The only room with torch."""
