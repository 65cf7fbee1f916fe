"""Requests as the controller sees them: who waits, who runs where, who is suspected."""
