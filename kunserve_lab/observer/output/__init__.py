"""Terminal lines, JSON lines, `/metrics` of its own, and a report of a day."""
