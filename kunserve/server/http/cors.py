"""Which web pages may ask this server from a browser (CORS)."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from kunserve.core.config import ServerConfig

CLOSED = "/kunserve/"
"""No page of another origin gets these: they show the cluster, and some of them change it."""


class PageMiddleware:
    """Pure ASGI middleware before the key is asked for, because a preflight carries none."""

    def __init__(self, app: ASGIApp, server: ServerConfig) -> None:
        self._app = app
        self._cors = CORSMiddleware(
            app,
            allow_origins=server.allowed_origins,
            allow_methods=server.allowed_methods,
            allow_headers=server.allowed_headers,
            allow_credentials=server.allow_credentials,
            expose_headers=["x-request-id"],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the module."""
        is_closed = scope["type"] != "http" or scope["path"].startswith(CLOSED)
        await (self._app if is_closed else self._cors)(scope, receive, send)
