"""Other processes of one server on this machine."""
