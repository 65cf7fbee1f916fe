"""Structured outputs at the front: which form a body asks for, and whether it can be had."""
