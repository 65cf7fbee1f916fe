"""Bursts that were too much for the fleet, and what would have helped."""
