"""Connections and requests before anybody knows what they ask: limits, keys, errors."""
