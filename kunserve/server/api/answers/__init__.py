"""Answers: text from tokens, stop strings, log-probabilities, streams."""
