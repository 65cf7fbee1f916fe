"""The outermost layer: one path for each endpoint, CORS, request ids, the API key, last resort."""

import logging
import re
import uuid
from collections.abc import Callable

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kunserve.core.config import ServerConfig
from kunserve.server.http.api_keys import ApiKeys
from kunserve.server.http.errors import Forbidden, Unauthorized, error_answer
from kunserve.server.http.paths import plain_path
from kunserve.server.http.web_guard import check_host, is_loopback

logger = logging.getLogger("kunserve.server")

OPEN_PATHS = frozenset({"/health", "/health/ready", "/livez", "/metrics", "/ping", "/readyz"})
"""Answered without a key, and also on connections beyond the limit."""
DASHBOARD = "/dashboard"
"""Root of the static page, answered without a key: the data it then asks for does need one."""
GIVEN_ID = "request_id"
"""In ``scope["state"]``: the X-Request-Id that the client sent, if it is fit for a log."""
ANSWER_ID = "answer_id"
"""There too: the X-Request-Id of the answer, the client's or a new one."""
CLOSED = "/kunserve/"
"""No page of another origin gets these: they show the cluster, and some of them change it."""
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,200}")


class FrontMiddleware:
    """Pure ASGI: every request leaves with an X-Request-Id and, on failure, a JSON error.

    Where everybody may change the cluster from this host, a foreign Host header is refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        server: ServerConfig | None = None,
        keys: ApiKeys | None = None,
        answer_error: Callable[[str, Exception], Response] | None = None,
    ) -> None:
        server = server or ServerConfig()
        self._app = app
        self._answer_error = answer_error or (lambda _path, error: error_answer(error))
        self._keys = keys
        self._prefix = server.root_path.rstrip("/")
        self._only_this_host = server.has_open_admin and is_loopback(server.host)
        self._for_pages: ASGIApp = self._guarded
        if server.allowed_origins:  # before the key is asked for, because a preflight carries none
            self._for_pages = CORSMiddleware(
                self._guarded,
                allow_origins=server.allowed_origins,
                allow_methods=server.allowed_methods,
                allow_headers=server.allowed_headers,
                allow_credentials=server.allow_credentials,
                expose_headers=["x-request-id"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. The prefix is taken away if it is there: some proxies do it themselves."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = plain_path(scope["path"], self._prefix)
        if path != scope["path"]:
            scope = {**scope, "path": path}
        inner = self._guarded if path.startswith(CLOSED) else self._for_pages
        await inner(scope, receive, send)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope["state"][ANSWER_ID] = request_id.decode("ascii")
        if request_id is given:
            scope["state"][GIVEN_ID] = given.decode("ascii")
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if not started:
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            refusal = self._refusal(scope["path"], headers)
            if refusal is not None:
                answer = self._answer_error(scope["path"], refusal)
                await answer(scope, receive, send_with_id)
                return
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            return
        except Exception as error:
            logger.exception(
                "request failed path=%s request=%s",
                scope["raw_path"].decode("ascii", "replace"),
                request_id.decode(),
            )
            if started:
                raise
            await self._answer_error(scope["path"], error)(scope, receive, send_with_id)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> Exception | None:
        """Why this request may not enter, judged by its headers."""
        if path in OPEN_PATHS:
            return None
        if self._only_this_host:
            host = headers.get(b"host")
            try:
                check_host(None if host is None else host.decode("latin-1"))
            except Forbidden as refusal:
                return refusal
        if self._keys is None or path in ("/", DASHBOARD) or path.startswith(f"{DASHBOARD}/"):
            return None
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        bearer = key.strip() if scheme.lower() == b"bearer" else b""
        if self._keys.has(bearer) or self._keys.has(headers.get(b"x-api-key", b"")):
            return None
        return Unauthorized("The API key is missing or wrong.")
