"""/pause, /resume, /is_paused, /is_sleeping and /abort_requests, as vLLM names them."""

import asyncio
import logging
import re
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from kunserve.core.errors import InvalidRequest
from kunserve.server.api.front import Front
from kunserve.server.api.generation import Generation
from kunserve.server.api.openai_routes import OpenAIRoutes
from kunserve.server.http.errors import TryLater, json_answer
from kunserve.server.telemetry.accounts import OwnAccounts
from kunserve_extras.admin import AdminRoutes

logger = logging.getLogger("kunserve.server")

WAIT_S = 600.0
"""So long ``mode=wait`` waits for answers to end. It may be asked again."""
POLL_S = 0.05


class AbortBody(BaseModel):
    """POST /abort_requests: no ids mean all requests."""

    model_config = ConfigDict(strict=True, extra="ignore")

    request_ids: list[str] | None = None


def routes(front: Front, _openai: OpenAIRoutes) -> list[Route]:
    """What the seam ``routes`` of a server takes."""
    own = Pausing(front)
    return [
        Route("/pause", own.pause, methods=["POST"]),
        Route("/resume", own.resume, methods=["POST"]),
        Route("/abort_requests", own.abort, methods=["POST"]),
        Route("/is_paused", own.is_paused, methods=["GET"]),
        Route("/is_sleeping", own.is_sleeping, methods=["GET"]),
    ]


class Pausing:
    """The endpoints. Those that change something need ``--enable-admin``."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._admin = AdminRoutes(front)

    async def pause(self, http: HttpRequest) -> Response:
        """POST /pause: new requests get 503 until /resume. Raises TryLater if answers go on."""
        self._check(http)
        mode = http.query_params.get("mode", "abort")
        if mode not in ("abort", "wait"):
            raise InvalidRequest(
                "`mode` must be `abort` or `wait`: requests do not freeze.", "mode"
            )
        front = self._front
        front.is_paused = True
        try:
            async with asyncio.timeout(WAIT_S):
                while front.num_in_flight:
                    if mode == "abort":  # again, because some were on their way in
                        _abort(front.generations)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise TryLater(f"{front.num_in_flight} answers are not complete yet") from None
        if http.query_params.get("clear_cache", "true").lower() not in ("false", "0"):
            await front.engine.reset_prefix_cache()
        logger.info("admin action=pause mode=%s", mode)
        return json_answer({"status": "paused"})

    async def resume(self, http: HttpRequest) -> Response:
        """POST /resume."""
        self._check(http)
        self._front.is_paused = False
        logger.info("admin action=resume")
        return json_answer({"status": "resumed"})

    async def abort(self, http: HttpRequest) -> Response:
        """POST /abort_requests. An id is that of an answer, or the X-Request-Id of its request."""
        self._check(http)
        body = await self._front.bodies.read(http, AbortBody, b"{}")
        chosen = self._front.generations
        if body.request_ids:
            names = "|".join(map(re.escape, body.request_ids))
            # The engine's ids have a kind before it, and a choice's number behind it.
            pattern = re.compile(rf"(?:[a-z]+[-_])?(?:{names})(?:-[0-9a-f]{{8}})?-\d+")
            chosen = tuple(one for one in chosen if _is_named(one, pattern))
        _abort(chosen)
        logger.info("admin action=abort_requests requests=%d", len(chosen))
        return json_answer({"status": "aborted", "aborted": len(chosen)})

    async def is_paused(self, _http: HttpRequest) -> Response:
        """GET /is_paused."""
        return json_answer({"is_paused": self._front.is_paused})

    async def is_sleeping(self, _http: HttpRequest) -> Response:
        """GET /is_sleeping: never, because memory is given back by fewer instances."""
        return json_answer({"is_sleeping": False})

    def _check(self, http: HttpRequest) -> None:
        self._admin.check_origin_allowed(http)
        if not isinstance(self._front.accounts, OwnAccounts):
            raise InvalidRequest("A server of several fronts is not paused.")


def _abort(generations: Iterable[Generation]) -> None:
    for generation in generations:
        generation.abort()


def _is_named(generation: Generation, pattern: re.Pattern[str]) -> bool:
    return any(pattern.fullmatch(one.request.request_id) for one in generation.choices)
