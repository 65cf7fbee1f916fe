"""Extras of a server, each behind a seam: nothing in the serving house imports them by name."""
