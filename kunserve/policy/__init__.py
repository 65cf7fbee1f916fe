"""Decisions: frozen views in, a frozen decision out."""
