"""A request's body as the server reads it, without a server."""

import asyncio
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest

from kunserve.server.http.body import BodyReader
from kunserve.server.http.limits import FrontLimits

Body = TypeVar("Body", bound=BaseModel)


def read_body(shape: type[Body], raw: bytes) -> Body:
    """Raises what a client is told."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": raw, "more_body": False}

    http = HttpRequest({"type": "http", "headers": []}, receive)
    return asyncio.run(BodyReader(FrontLimits(), 100).read(http, shape))
