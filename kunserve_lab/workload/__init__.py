"""What arrives when, and how long it is: traces, length sets, arrivals, scaling; all seeded."""
