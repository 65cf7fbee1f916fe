"""A model in the program that uses it: ``from kunserve import LLM, SamplingParams``."""
