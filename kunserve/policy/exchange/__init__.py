"""Whose KV moves where, and in which order."""
