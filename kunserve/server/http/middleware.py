"""The outermost layer of the application: request ids, the API key, and the last resort."""

import logging
import re
import uuid

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kunserve.server.http.api_keys import ApiKeys
from kunserve.server.http.errors import Forbidden, Unauthorized, error_answer
from kunserve.server.http.web_guard import check_host

logger = logging.getLogger("kunserve.server")

OPEN_PATHS = frozenset({"/health", "/health/ready", "/livez", "/metrics", "/ping", "/readyz"})
"""Answered without a key, and also on connections beyond the limit."""
DASHBOARD = "/dashboard"
"""Root of the static page, answered without a key: the data it then asks for does need one."""
GIVEN_ID = "request_id"
"""In ``scope["state"]``: the X-Request-Id that the client sent, if it is fit for a log."""
ANSWER_ID = "answer_id"
"""There too: the X-Request-Id of the answer, the client's or a new one."""
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,200}")


class FrontMiddleware:
    """Pure ASGI middleware. With ``only_this_host`` a foreign Host header is refused."""

    def __init__(
        self, app: ASGIApp, keys: ApiKeys | None = None, only_this_host: bool = False
    ) -> None:
        self._app = app
        self._keys = keys
        self._only_this_host = only_this_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: every request leaves with an X-Request-Id and, on failure, a JSON error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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
                await error_answer(refusal)(scope, receive, send_with_id)
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
            await error_answer(error)(scope, receive, send_with_id)

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
        if scheme.lower() == b"bearer" and self._keys.has(key.strip()):
            return None
        return Unauthorized("The API key is missing or wrong.")
