"""The laboratory: load, comparisons, simulations and worlds in one process. No server needs it."""
