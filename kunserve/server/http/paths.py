"""One path for each endpoint, and what is said of a path that is not there."""

import difflib
from collections.abc import Sequence

from starlette.routing import BaseRoute, Route

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
    alike = difflib.get_close_matches(path[:100], known, n=1, cutoff=0.9)
    found = next((one for one in (*near, *alike) if one != path and one in known), None)
    hint = f" Did you mean {found}?" if found else ""
    return f"There is no {path[:100]!a} on this server.{hint}"


def plain_path(path: str, prefix: str) -> str:
    """Without the proxy's prefix, if it is there, and without a slash at the end."""
    if prefix and f"{path}/".startswith(f"{prefix}/"):
        path = path[len(prefix) :] or "/"
    if path.endswith("/") and path != PAGE_WITH_SLASH:
        path = path.rstrip("/") or "/"
    return path
