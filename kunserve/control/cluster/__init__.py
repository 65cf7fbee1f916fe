"""The cluster's decider, one per cluster: who serves what, and when groups change."""
