"""From a command line to a running server."""
