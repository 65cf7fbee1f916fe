"""An instance's memory: granules, address ranges, weights and KV units."""
