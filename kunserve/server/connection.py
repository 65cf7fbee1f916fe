"""HTTP connections with limits: on their number, on silence, and on header size.

uvicorn's own ``limit_concurrency`` answers health checks with 503 too, and lets silent
connections stay for ever.
"""

import asyncio
import contextlib
import json
import logging
from asyncio.events import TimerHandle
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kunserve.core.errors import Overloaded
from kunserve.server.errors import error_answer, error_object
from kunserve.server.limits import FrontLimits
from kunserve.server.middleware import OPEN_PATHS, FrontMiddleware
from kunserve.server.streaming import DROP_CONNECTION

logger = logging.getLogger("kunserve.server")

_TOO_MANY = Overloaded("Too many connections.")


def _raw_answer(status: str, body: dict[str, Any], *headers: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [
        f"HTTP/1.1 {status}",
        "content-type: application/json",
        f"content-length: {len(content)}",
        "connection: close",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def _plain_error(status: int, phrase: str, kind: str, message: str) -> bytes:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return _raw_answer(f"{status} {phrase}", {"error": error})


REFUSAL = _raw_answer("503 Service Unavailable", error_object(_TOO_MANY), "retry-after: 1")
HEADERS_TOO_LARGE = _plain_error(
    431, "Request Header Fields Too Large", "BadRequestError", "The request headers are too large."
)
HEADERS_TOO_SLOW = _plain_error(
    408, "Request Timeout", "RequestTimeoutError", "The request headers did not arrive in time."
)


class OverflowApp:
    """Stands in for the application on a connection beyond the limit: health checks only."""

    def __init__(self, app: ASGIApp, body_timeout_s: float) -> None:
        self._app = app
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: open paths are served, everything else is told to come back."""
        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
        else:
            # Closing on a body that is still coming would reset the answer away.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._body_timeout_s):
                    while (await receive()).get("more_body"):
                        pass
            await FrontMiddleware(error_answer(_TOO_MANY), None)(scope, receive, send)


class FrontProtocol(HttpToolsProtocol):
    """One connection. Subclassed by ``limited_protocol``, which sets the limits."""

    max_connections: int
    hard_limit: int
    limits: FrontLimits

    _deadline: TimerHandle | None = None
    _header_bytes = 0
    _in_headers = False
    _lost = False
    _overflow = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, for a moment only if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.hard_limit:
            transport.abort()
            return
        self._in_headers = True
        self._overflow = len(self.connections) > self.max_connections
        if self._overflow:
            self.app = OverflowApp(self.app, self.limits.overflow_timeout_s)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        self._lost = True
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count header bytes, which the parser does not bound."""
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._header_bytes > self.limits.max_header_bytes:
            self._refuse(HEADERS_TOO_LARGE)

    def on_message_begin(self) -> None:
        """A request's first byte: its headers are due."""
        super().on_message_begin()
        self._in_headers = True
        self._arm()

    def on_headers_complete(self) -> None:
        """The headers are here: what follows is the application's to bound."""
        self._disarm()
        self._in_headers = False
        self._header_bytes = 0
        self.scope["extensions"] = {DROP_CONNECTION: {"call": self.transport.abort}}
        super().on_headers_complete()
        if self._overflow:
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """A request that is no HTTP: our error shape instead of plain text."""
        self._refuse(_plain_error(400, "Bad Request", "BadRequestError", msg))

    def on_response_complete(self) -> None:
        """The answer is written, but a client that does not read may keep us from closing."""
        super().on_response_complete()
        if not self._lost and self.transport.get_write_buffer_size():
            self._abort_unless_read()

    def timeout_keep_alive_handler(self) -> None:
        """An idle connection is closed, whatever is left in its buffer."""
        super().timeout_keep_alive_handler()
        self._abort_unless_read()

    def _abort_unless_read(self) -> None:
        """Reset the connection as soon as its buffer stays as full as it was for too long."""
        unread = self.transport.get_write_buffer_size()
        self.loop.call_later(self.limits.write_timeout_s, self._check_reading, unread)

    def _check_reading(self, unread_before: int) -> None:
        unread = 0 if self._lost else self.transport.get_write_buffer_size()
        if unread and unread == unread_before:
            self.transport.abort()
        elif unread:
            self._abort_unless_read()

    def _arm(self) -> None:
        self._disarm()
        limits = self.limits
        delay_s = limits.overflow_timeout_s if self._overflow else limits.header_timeout_s
        self._deadline = self.loop.call_later(delay_s, self._expire)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        self._refuse(REFUSAL if self._overflow else HEADERS_TOO_SLOW)

    def _refuse(self, answer: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()
            self._abort_unless_read()


def limited_protocol(
    connection_limit: int, overflow: int, front_limits: FrontLimits
) -> type[FrontProtocol]:
    """The protocol class for uvicorn: ``connection_limit`` served, ``overflow`` more told so."""

    class LimitedProtocol(FrontProtocol):
        max_connections = connection_limit
        hard_limit = connection_limit + overflow
        limits = front_limits

    return LimitedProtocol
