"""Experiments: the open-loop client, the metrics, the report and the figures.

Reaches an engine over HTTP only, so that any OpenAI server can be measured the same way.
"""
