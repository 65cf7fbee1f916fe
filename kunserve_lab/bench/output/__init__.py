"""What a load run shows: progress, a report, a figure."""
