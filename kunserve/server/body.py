"""Reading a request body: bounded in bytes and in time."""

import asyncio

from starlette.requests import Request

from kunserve.server.errors import BodyTooLarge, BodyTooSlow
from kunserve.server.limits import FrontLimits


async def read_body(request: Request, limits: FrontLimits) -> bytes:
    """The whole body. Raises BodyTooLarge, BodyTooSlow, or Starlette's ClientDisconnect.

    A body that is somewhat too large is read to its end and thrown away: a client that is still
    sending when the connection closes would see a reset instead of the answer.
    """
    refusal = BodyTooLarge(f"The request body exceeds {limits.max_body_bytes} bytes.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limits.max_discarded_bytes:
        raise refusal
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limits.max_discarded_bytes:
                    raise refusal
                if size > limits.max_body_bytes:
                    parts.clear()
                else:
                    parts.append(part)
    except TimeoutError:
        raise BodyTooSlow(
            f"The request body did not arrive within {limits.body_timeout_s:g} s."
        ) from None
    if size > limits.max_body_bytes:
        raise refusal
    return b"".join(parts)
