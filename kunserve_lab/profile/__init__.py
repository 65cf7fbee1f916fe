"""Measuring the real engine: batches of many shapes, timed through the body that serves."""
