"""Models in GGUF files: their header, their shape, their tokenizer."""
