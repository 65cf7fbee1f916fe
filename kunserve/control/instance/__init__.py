"""The instance's decider, one per instance: where KV and weights lie, and its part in changes."""
