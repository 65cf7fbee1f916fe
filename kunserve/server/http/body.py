"""Request bodies: bounded in bytes, in values and in time, one by one and all together."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from kunserve.core.errors import InvalidRequest
from kunserve.server.api.schema import invalid_field
from kunserve.server.http.errors import BodyTooLarge, BodyTooSlow, TooManyBodies
from kunserve.server.http.limits import FrontLimits

Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")


class BodyReader:
    """Reads every endpoint's bodies."""

    def __init__(self, limits: FrontLimits, max_model_len: int) -> None:
        self._limits = limits
        self._max_values = max(limits.max_body_values, 2 * max_model_len)
        self.unfinished_bytes = 0
        """Of bodies that are being read, beyond the first part of each."""

    async def read(self, http: HttpRequest, shape: type[Body], default: bytes = b"") -> Body:
        """The body as a ``shape``; ``default`` stands for an empty one.

        Raises InvalidRequest, BodyTooLarge, BodyTooSlow, TooManyBodies, or Starlette's
        ClientDisconnect.
        """
        raw = await self._receive(http) or default
        if raw.count(b",") > self._max_values:
            raise InvalidRequest(f"The request body may hold at most {self._max_values} values.")
        try:
            return shape.model_validate_json(raw)
        except ValidationError as error:
            raise invalid_field(error) from None

    async def _receive(self, http: HttpRequest) -> bytes:
        """The whole body.

        A body that is somewhat too large is read to its end and thrown away: a client that is
        still sending when the connection closes would see a reset instead of the answer.
        """
        limits = self._limits
        too_large = BodyTooLarge(f"The request body exceeds {limits.max_body_bytes} bytes.")
        declared = http.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > limits.max_discarded_bytes:
            raise too_large
        refusal: Exception | None = None
        parts: list[bytes] = []
        size = counted = 0
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                async for part in http.stream():
                    size += len(part)
                    if size > limits.max_discarded_bytes:
                        raise too_large
                    more = max(0, size - limits.small_body_bytes) - counted
                    if size > limits.max_body_bytes:
                        refusal = too_large
                    elif more and self.unfinished_bytes + more > limits.max_unfinished_bytes:
                        refusal = TooManyBodies("Too many large request bodies are on their way.")
                    if refusal is None:
                        parts.append(part)
                    else:
                        parts.clear()
                        more = -counted
                    counted += more
                    self.unfinished_bytes += more
        except TimeoutError:
            raise BodyTooSlow(
                f"The request body did not arrive within {limits.body_timeout_s:g} s."
            ) from None
        finally:
            self.unfinished_bytes -= counted
        if refusal is not None:
            raise refusal
        return b"".join(parts)


async def unless_gone(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns; it is cancelled, and ClientDisconnect raised, if the client leaves.

    Called once the body has been read, until somebody else watches the connection.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(http))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnect(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
