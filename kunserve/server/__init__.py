"""The OpenAI-compatible HTTP front: parsing, streaming, metrics, drain. Holds no model."""
