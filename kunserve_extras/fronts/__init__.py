"""Several processes that speak HTTP before one controller (``--api-server-count``).

    clients -> front processes (HTTP, JSON, tokens <-> text) -> this process (controller)

A front is what ``create_app`` makes, over an ``EngineClient`` whose engine is at the other end of
a socket pair. The controller's process starts the fronts, serves each at a *desk*, and keeps the
accounts of all. With one front none of this is used.
"""
