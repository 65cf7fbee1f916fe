"""``GET /dashboard``: the live page of a server."""
