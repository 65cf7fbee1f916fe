"""Hidden states from one stage into the memory of the next, on one machine."""
