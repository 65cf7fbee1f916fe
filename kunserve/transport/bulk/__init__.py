"""Bytes of KV and weights, pulled by whoever needs them."""
