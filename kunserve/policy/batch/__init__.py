"""What a step computes, what it costs, and who makes way for whom."""
