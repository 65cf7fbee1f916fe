"""What a server tells of itself: metrics, logs, the last minutes."""
