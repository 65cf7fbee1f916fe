"""The outermost layer of the application: request ids, the API key, and the last resort."""

import hmac
import logging
import re
import uuid

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kunserve.server.errors import Unauthorized, error_answer

logger = logging.getLogger("kunserve.server")

OPEN_PATHS = frozenset({"/health", "/health/ready", "/metrics"})
"""Answered without a key, and also on connections beyond the limit."""
DASHBOARD = "/dashboard"
"""Root of the static page, answered without a key: the data it then asks for does need one."""
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,200}")


class FrontMiddleware:
    """Pure ASGI middleware."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._api_key = api_key.encode() if api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: every request leaves with an X-Request-Id and, on failure, a JSON error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if not started:
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            if not self._is_allowed(scope["path"], headers):
                await error_answer(Unauthorized("The API key is missing or wrong."))(
                    scope, receive, send_with_id
                )
                return
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            return
        except Exception as error:
            logger.exception(
                "request failed path=%s request_id=%s", scope["path"], request_id.decode()
            )
            if started:
                raise
            await error_answer(error)(scope, receive, send_with_id)

    def _is_allowed(self, path: str, headers: dict[bytes, bytes]) -> bool:
        if self._api_key is None or path in OPEN_PATHS:
            return True
        if path == DASHBOARD or path.startswith(f"{DASHBOARD}/"):
            return True
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._api_key)
