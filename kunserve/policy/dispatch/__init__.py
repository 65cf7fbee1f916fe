"""Which group a request goes to."""
