"""What a model is, read from its files without torch: where they are, its shape, its tokenizer."""
