"""One path for each endpoint: without the proxy's prefix, and without a slash at its end."""

from collections.abc import Sequence

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kunserve.server.api.unsupported import OTHER_ENDPOINTS

PAGE_WITH_SLASH = "/dashboard/"
"""Redirected instead, because the page's files have names relative to ``/dashboard``."""


def unknown_path(path: str, routes: Sequence[BaseRoute]) -> str:
    """What a client is told that asks for a path which is not there."""
    reason = OTHER_ENDPOINTS.get(path)
    if reason is not None:
        return f"{path} is not served here: {reason}"
    known = {route.path for route in routes if isinstance(route, Route)}
    near = (f"/v1{path}", path.replace("/v1/v1/", "/v1/", 1))
    found = next((one for one in near if one != path and one in known), None)
    hint = f" Did you mean {found}?" if found else ""
    return f"There is no {path[:100]!a} on this server.{hint}"


class PathMiddleware:
    """Pure ASGI middleware, outermost: the guards behind it see the path that is served.

    The prefix is taken away if it is there: some proxies do it themselves.
    """

    def __init__(self, app: ASGIApp, root_path: str = "") -> None:
        self._app = app
        self._prefix = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the module."""
        if scope["type"] == "http":
            path = self._plain(scope["path"])
            if path != scope["path"]:
                scope = {**scope, "path": path}
        await self._app(scope, receive, send)

    def _plain(self, path: str) -> str:
        if self._prefix and f"{path}/".startswith(f"{self._prefix}/"):
            path = path[len(self._prefix) :] or "/"
        if path.endswith("/") and path != PAGE_WITH_SLASH:
            path = path.rstrip("/") or "/"
        return path
