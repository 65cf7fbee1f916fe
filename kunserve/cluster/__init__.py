"""The real driver: starts instances, carries messages, watches lives."""
