"""Experiments in the simulated world, measured as real ones are."""
