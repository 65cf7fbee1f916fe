"""HTTP connections with limits: on their number, on silence, and on header size.

uvicorn's own ``limit_concurrency`` answers health checks with 503 too, and lets silent
connections stay for ever.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import struct
import termios
from asyncio.events import TimerHandle
from typing import Any, Protocol

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kunserve.server.http.errors import TooManyConnections, error_answer, error_object
from kunserve.server.http.limits import FrontLimits
from kunserve.server.http.middleware import OPEN_PATHS, FrontMiddleware

logger = logging.getLogger("kunserve.server")

MAX_PIPELINED = 16
"""Requests that may wait for their turn on one connection before it is no longer read."""
_TOO_MANY = TooManyConnections("Too many connections.")
_HOP_BY_HOP = {b"upgrade", b"http2-settings"}


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
MALFORMED = _plain_error(400, "Bad Request", "BadRequestError", "This is no valid HTTP request.")


class Refusals(Protocol):
    """Counts what is refused."""

    def refused(self, error: Exception) -> None:
        """Somebody was."""
        ...


class OverflowApp:
    """Stands in for the application on a connection beyond the limit: health checks only."""

    def __init__(self, app: ASGIApp, body_timeout_s: float, refusals: Refusals) -> None:
        self._app = app
        self._body_timeout_s = body_timeout_s
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: open paths are served, everything else is told to come back."""
        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
        else:
            self._refusals.refused(_TOO_MANY)
            # Closing on a body that is still coming would reset the answer away.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._body_timeout_s):
                    while (await receive()).get("more_body"):
                        pass
            await FrontMiddleware(error_answer(_TOO_MANY))(scope, receive, send)


def kernel_held_bytes(transport: asyncio.Transport) -> int:
    """Bytes written to a socket that its other end has not accepted yet."""
    try:
        number = transport.get_extra_info("socket").fileno()
        held = fcntl.ioctl(number, termios.TIOCOUTQ, struct.pack("i", 0))
    except (OSError, ValueError):  # closed meanwhile
        return 0
    return int(struct.unpack("i", held)[0])


class FrontProtocol(HttpToolsProtocol):
    """One connection. Subclassed by ``limited_protocol``, which sets the limits."""

    max_connections: int
    hard_limit: int
    limits: FrontLimits
    refusals: Refusals

    _cycles: tuple[RequestResponseCycle, ...] = ()
    """Requests whose answer is not complete: uvicorn itself remembers only the latest."""
    _deadline: TimerHandle | None = None
    _header_bytes = 0
    _in_headers = False
    _is_deaf = False
    """Whether what still comes is ignored, because the connection ends."""
    _lost = False
    _overflow = False
    _read_check: TimerHandle | None = None
    _wants_upgrade = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, for a moment only if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.hard_limit:
            self.refusals.refused(_TOO_MANY)
            transport.abort()
            return
        self._in_headers = True
        self._overflow = len(self.connections) > self.max_connections
        if self._overflow:
            self.app = OverflowApp(self.app, self.limits.overflow_timeout_s, self.refusals)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of the connection that its client is gone."""
        self._lost = True
        self._disarm()
        self._stop_read_check()
        for cycle in self._unfinished():
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, and count header bytes, which the parser does not bound."""
        if self._is_deaf:
            return
        if self._in_headers:
            self._header_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay_with_http1(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(MALFORMED)
        if self._in_headers and self._header_bytes > self.limits.max_header_bytes:
            self._refuse(HEADERS_TOO_LARGE)

    def on_message_begin(self) -> None:
        """A request's first byte: its headers are due."""
        super().on_message_begin()
        self._in_headers = True
        self._arm()

    def on_headers_complete(self) -> None:
        """The headers are here: what follows is the application's to bound."""
        self._wants_upgrade = self.parser.should_upgrade()
        if self._wants_upgrade:
            return  # the parser now gives up, see ``_stay_with_http1``
        self._disarm()
        self._in_headers = False
        self._header_bytes = 0
        super().on_headers_complete()
        self._cycles = (*self._unfinished(), self.cycle)
        if self._overflow:
            self.cycle.keep_alive = False
        if 0 < len(self.pipeline) < MAX_PIPELINED:
            # A connection that is not read does not tell that its client is gone.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Keep a piece of a body; those of all requests on the connection have one bound."""
        super().on_body(body)
        if self.pipeline and sum(len(cycle.body) for cycle in self._cycles) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        """The body is here; a request that wants an upgrade is not begun yet."""
        if not self._wants_upgrade:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is written, but a client that does not read may keep us from closing."""
        super().on_response_complete()
        self._abort_unless_read()

    def pause_writing(self) -> None:
        """The client reads more slowly than we write: see whether it reads at all."""
        super().pause_writing()
        self._abort_unless_read()

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._stop_read_check()

    def timeout_keep_alive_handler(self) -> None:
        """An idle connection is closed, whatever is left in its buffer."""
        super().timeout_keep_alive_handler()
        self._abort_unless_read()

    def _unfinished(self) -> list[RequestResponseCycle]:
        return [cycle for cycle in self._cycles if not cycle.response_complete]

    def _stay_with_http1(self, rest: bytes) -> None:
        """Take a request that wants another protocol as if it did not, which HTTP allows.

        The parser stops behind its headers, and would read its body as the next request.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(MALFORMED)
            return
        head = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(one for one in tokens if one.lower() not in _HOP_BY_HOP)
            if name not in _HOP_BY_HOP:
                head.append(b"%b: %b" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(b"\r\n".join(head) + b"\r\n\r\n" + rest)

    # A client that does not read

    def _num_buffered(self) -> int:
        return 0 if self._lost else self.transport.get_write_buffer_size()

    def _num_unread(self) -> int:
        """Bytes that the client has not accepted: ours, and those that the kernel holds."""
        return self._num_buffered() + kernel_held_bytes(self.transport)

    def _abort_unless_read(self) -> None:
        """Reset the connection as soon as the client accepts nothing for too long."""
        self._stop_read_check()
        if self._num_buffered():
            self._read_check = self.loop.call_later(
                self.limits.write_timeout_s, self._check_reading, self._num_unread()
            )

    def _stop_read_check(self) -> None:
        if self._read_check is not None:
            self._read_check.cancel()
            self._read_check = None

    def _check_reading(self, unread_before: int) -> None:
        self._read_check = None
        unread = self._num_unread()
        if self._num_buffered() and unread == unread_before:
            logger.warning("client stopped reading client=%s unread_bytes=%d", self.client, unread)
            self.transport.abort()
        else:
            self._abort_unless_read()

    # A request that does not come, or is none

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
        if self._overflow:
            self.refusals.refused(_TOO_MANY)
            self._refuse(REFUSAL)
        elif self._header_bytes or self._cycles:
            self._refuse(HEADERS_TOO_SLOW)
        else:
            # Nothing was asked: a text would be taken for the answer to a request yet to come.
            self._refuse(b"")

    def _refuse(self, answer: bytes) -> None:
        """End the connection; ``answer`` is for the request that is incomplete or malformed.

        It is not sent into the answer to an earlier request. That one is finished first.
        """
        self._is_deaf = True
        self._disarm()
        if self.transport.is_closing():
            return
        sound = [cycle for cycle in self._unfinished() if not cycle.more_body]
        broken = [cycle for cycle in self._unfinished() if cycle.more_body]
        if sound:
            sound[-1].keep_alive = False
            return
        if not any(cycle.response_started for cycle in broken):
            self.transport.write(answer)
        self.transport.close()
        self._abort_unless_read()


def limited_protocol(
    connection_limit: int, overflow: int, front_limits: FrontLimits, counted: Refusals
) -> type[FrontProtocol]:
    """The protocol class for uvicorn: ``connection_limit`` served, ``overflow`` more told so.

    ``counted`` hears of each that is not served, those beyond the overflow too.
    """

    class LimitedProtocol(FrontProtocol):
        max_connections = connection_limit
        hard_limit = connection_limit + overflow
        limits = front_limits
        refusals = counted

    return LimitedProtocol
