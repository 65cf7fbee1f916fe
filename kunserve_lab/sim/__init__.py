"""The simulated world: virtual clock, instances without machines, links, and hardware profiles."""
