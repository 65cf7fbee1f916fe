"""Several processes that hold and compute one instance together (tensor parallelism)."""
