"""The group's decider, one per group, on its leader: which tokens the next step computes."""
