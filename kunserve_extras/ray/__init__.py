"""Instances on the nodes of a Ray cluster. Nobody else knows Ray, or imports it."""
