"""``GET /dashboard``: the live page, and the files it is made of.

The page is static and carries nothing of the cluster, so like ``/metrics`` it is served without
an API key (a browser's address bar could not send one). What it shows comes from
``/kunserve/state`` and ``/kunserve/timeline``, which want the key as everything else does: when
the server has one, the page asks its visitor for it and keeps it for the tab's lifetime.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from kunserve.server.api.front import Front
from kunserve.server.api.openai_routes import OpenAIRoutes
from kunserve.server.http.paths import PAGE_WITH_SLASH
from kunserve_extras.dashboard.timeline_route import TimelineRoute

FOLDER = Path(__file__).parent / "web"
PAGE = "page.html"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Nothing but the page's own files runs, and no text can become markup."""

HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""``no-cache``: kept by the browser, but asked for again, which costs an empty 304."""


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


def _read_files() -> dict[str, _File]:
    files = {}
    for path in sorted(FOLDER.iterdir()):
        media_type = MEDIA_TYPES.get(path.suffix)
        if media_type is not None:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            files[path.name] = _File(content, media_type, etag)
    assert PAGE in files, FOLDER
    return files


def routes(front: Front, _openai: OpenAIRoutes) -> list[Route]:
    """What the seam ``routes`` of a server takes."""
    dashboard = DashboardRoutes()
    get = ["GET"]
    return [
        Route("/kunserve/timeline", TimelineRoute(front).timeline, methods=get),
        Route("/", dashboard.root, methods=get),
        Route("/dashboard", dashboard.page, methods=get),
        Route(PAGE_WITH_SLASH, dashboard.with_slash, methods=get),
        Route("/dashboard/{name}", dashboard.file, methods=get),
    ]


class DashboardRoutes:
    """The page's files, read once when the application is made."""

    def __init__(self) -> None:
        self._files = _read_files()

    async def page(self, http: HttpRequest) -> Response:
        """GET /dashboard."""
        return _answer(http, self._files[PAGE])

    async def root(self, http: HttpRequest) -> Response:
        """GET /: a visitor wants the page. Relative, because a proxy may have put a prefix.

        A browser replaces what is after the last slash: a prefix without a slash is said again.
        """
        last = http.scope["raw_path"].rpartition(b"/")[2].decode("ascii", "replace")
        return RedirectResponse(f"{last}/dashboard" if last else "dashboard")

    async def with_slash(self, _http: HttpRequest) -> Response:
        """GET /dashboard/: the page's files have names relative to ``/dashboard``."""
        return RedirectResponse("../dashboard")

    async def file(self, http: HttpRequest) -> Response:
        """GET /dashboard/{name}: a style sheet or a script."""
        file = self._files.get(http.path_params["name"])
        if file is None:
            raise HTTPException(404)
        return _answer(http, file)


def _answer(http: HttpRequest, file: _File) -> Response:
    headers = HEADERS | {"etag": file.etag}
    if file.etag in http.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
