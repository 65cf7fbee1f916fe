"""What computes on any device of torch: decoder, recorded steps, operations, CUDA memory."""
