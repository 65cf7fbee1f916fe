"""What computes on CPUs: the decoder over C kernels, the ends, the shared head."""
