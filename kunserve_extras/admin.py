"""Write endpoints, off by default. Drops, restores, pauses and sizes are never "done" when nothing
changed.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from kunserve.control.cluster.scaling import NOT_STARTED, REFUSED_HOLD_S
from kunserve.core.errors import InvalidRequest
from kunserve.core.ids import InstanceId
from kunserve.core.snapshots import ClusterState
from kunserve.server.api.front import Front
from kunserve.server.api.openai_routes import OpenAIRoutes
from kunserve.server.api.schema import INT64_MAX
from kunserve.server.http.errors import Conflict, EffectMissing, Forbidden, TryLater, json_answer
from kunserve.server.http.web_guard import check_origin, check_page
from kunserve.server.telemetry.state_json import state_object

logger = logging.getLogger("kunserve.server")

VERIFY_S = 15.0
"""How long the effect may take to show in the cluster's state."""
POLL_S = 0.05
_NOT_RESET = {
    "reset_running_requests": "what running requests share stays until they end",
    "reset_external": "there is no cache outside",
}
"""Fields of vLLM's ``/reset_prefix_cache``, and why they are refused."""
TURN_S = 5.0
"""How long who asks for a size waits for those who asked before, and until it is the aim."""


class DropBody(BaseModel):
    """POST /kunserve/drop: how many bytes to free, one merge if not given."""

    model_config = ConfigDict(strict=True, extra="forbid")

    bytes: int | None = Field(None, ge=1, le=INT64_MAX)


class EmptyBody(BaseModel):
    """POST /kunserve/restore, /kunserve/pause and /kunserve/resume."""

    model_config = ConfigDict(strict=True, extra="forbid")


class KillBody(BaseModel):
    """POST /kunserve/kill."""

    model_config = ConfigDict(strict=True, extra="forbid")

    instance_id: int = Field(ge=0, le=INT64_MAX)


class ScaleBody(BaseModel):
    """POST /kunserve/scale."""

    model_config = ConfigDict(strict=True, extra="forbid")

    num_instances: int = Field(ge=1, le=INT64_MAX)


def _dropped_bytes(state: ClusterState) -> int:
    return sum(instance.dropped_bytes for instance in state.instances if instance.alive)


def routes(front: Front, _openai: OpenAIRoutes) -> list[Route]:
    """What the seam ``routes`` of a server takes."""
    admin = AdminRoutes(front)
    return [
        Route("/kunserve/drop", admin.drop, methods=["POST"]),
        Route("/kunserve/restore", admin.restore, methods=["POST"]),
        Route("/kunserve/kill", admin.kill, methods=["POST"]),
        Route("/kunserve/scale", admin.scale, methods=["POST"]),
        Route("/kunserve/pause", admin.pause, methods=["POST"]),
        Route("/kunserve/resume", admin.resume, methods=["POST"]),
        Route("/reset_prefix_cache", admin.reset_prefix_cache, methods=["POST"]),
    ]


class AdminRoutes:
    """Force a drop or a restore, pause both, kill an instance, or ask for more or fewer of them."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._scaling = asyncio.Lock()
        """Sizes are asked for in turn."""

    async def drop(self, http: HttpRequest) -> Response:
        """POST /kunserve/drop ``{"bytes": n}``."""
        self._check_allowed(http)
        body = await self._front.bodies.read(http, DropBody, b"{}")
        before = _dropped_bytes(self._front.engine.state())
        said = await self._front.engine.drop(body.bytes)
        state = await self._verified(
            "drop", lambda state: _dropped_bytes(state) > before and not _is_running(state)
        )
        return self._done("drop", said, before, state)

    async def restore(self, http: HttpRequest) -> Response:
        """POST /kunserve/restore. Pipelines that cannot part now go on; the result says why."""
        self._check_allowed(http)
        await self._front.bodies.read(http, EmptyBody, b"{}")
        before = _dropped_bytes(self._front.engine.state())
        said = await self._front.engine.restore()
        state = await self._verified(
            "restore", lambda state: _dropped_bytes(state) < max(1, before)
        )
        return self._done("restore", said, before, state)

    async def kill(self, http: HttpRequest) -> Response:
        """POST /kunserve/kill ``{"instance_id": n}``."""
        self._check_allowed(http)
        body = await self._front.bodies.read(http, KillBody)
        victim = InstanceId(body.instance_id)
        before = self._front.engine.state()
        if not any(one.spec.instance_id == victim and one.alive for one in before.instances):
            raise InvalidRequest(f"No live instance {victim}.", "instance_id")
        await self._front.engine.kill(victim)
        state = await self._verified(
            "kill",
            lambda state: (
                not any(one.spec.instance_id == victim and one.alive for one in state.instances)
            ),
        )
        return self._done("kill", f"instance {victim} killed", _dropped_bytes(before), state)

    async def scale(self, http: HttpRequest) -> Response:
        """POST /kunserve/scale ``{"num_instances": n}``: answers when that is the cluster's aim.

        Instances load for a while, and those that leave serve what they have. ``state.size`` and
        ``/health`` tell how far that is.
        """
        self._check_allowed(http)
        body = await self._front.bodies.read(http, ScaleBody)
        try:
            async with asyncio.timeout(TURN_S):
                await self._scaling.acquire()
        except TimeoutError:
            raise TryLater("another size is being asked for", round(TURN_S)) from None
        try:
            before = self._front.engine.state()
            said = await self._front.engine.scale(body.num_instances)
            state = await self._sized(body.num_instances, before.size.wanted)
        finally:
            self._scaling.release()
        return self._done("scale", said, _dropped_bytes(before), state)

    async def _sized(self, num_instances: int, before: int) -> ClusterState:
        """The first state whose aim is this. Raises Conflict when it is another one's aim, TryLater
        when the instances cannot be started now.
        """
        deadline_s = time.monotonic() + TURN_S
        while True:
            state = self._front.engine.state()
            wanted = state.size.wanted
            if wanted == num_instances:
                return state
            refusals = [text for text in state.reasons if text.startswith(NOT_STARTED)]
            if refusals:
                raise TryLater(
                    f"{wanted} instances are wanted, not {num_instances}: {refusals[0]}",
                    round(REFUSED_HOLD_S),
                )
            if wanted != before or time.monotonic() > deadline_s:
                raise Conflict(
                    f"{wanted} instances are wanted now, not {num_instances}: somebody else has "
                    "asked for another size, or the cluster has changed its own"
                )
            await asyncio.sleep(POLL_S)

    async def pause(self, http: HttpRequest) -> Response:
        """POST /kunserve/pause: drops and restores are made by hand only."""
        return await self._set_paused(http, True)

    async def resume(self, http: HttpRequest) -> Response:
        """POST /kunserve/resume: the end of a pause."""
        return await self._set_paused(http, False)

    async def _set_paused(self, http: HttpRequest, paused: bool) -> Response:
        self._check_allowed(http)
        await self._front.bodies.read(http, EmptyBody, b"{}")
        engine = self._front.engine
        before = engine.state()
        engine.set_paused(paused)
        action = "pause" if paused else "resume"
        state = await self._verified(action, lambda state: state.paused == paused)
        said = "drops and restores are made by hand only" if paused else "the policy acts again"
        if before.paused == paused:
            said += "; it was so before"
        return self._done(action, said, _dropped_bytes(before), state)

    async def reset_prefix_cache(self, http: HttpRequest) -> Response:
        """POST /reset_prefix_cache, vLLM's: the next run of a benchmark finds nothing."""
        self.check_origin_allowed(http)
        for name, why in _NOT_RESET.items():
            if http.query_params.get(name, "false").lower() not in ("false", "0"):
                raise InvalidRequest(f"`{name}` must be false: {why}.", name)
        await self._front.engine.reset_prefix_cache()
        logger.info("admin action=reset_prefix_cache")
        return Response()

    def check_origin_allowed(self, http: HttpRequest) -> None:
        """Whether a client that sends no JSON may change the cluster. Raises Forbidden if not."""
        if self._is_open():
            check_origin(http.headers)

    def _check_allowed(self, http: HttpRequest) -> None:
        if self._is_open():
            check_page(http.headers)

    def _is_open(self) -> bool:
        """Whether anybody who reaches the server may do this. Raises Forbidden if nobody may."""
        server = self._front.config.server
        if not server.enable_admin:
            raise Forbidden("Admin endpoints are off; start the server with --enable-admin.")
        return server.has_open_admin

    async def _verified(self, action: str, holds: Callable[[ClusterState], bool]) -> ClusterState:
        """The first state in which the effect shows. Raises EffectMissing."""
        deadline_s = time.monotonic() + VERIFY_S
        while True:
            state = self._front.engine.state()
            if holds(state):
                return state
            if time.monotonic() > deadline_s:
                raise EffectMissing(
                    f"{action}: the engine reported success, but its state does not show it."
                )
            await asyncio.sleep(POLL_S)

    def _done(self, action: str, said: str, before: int, state: ClusterState) -> Response:
        after = _dropped_bytes(state)
        logger.info("admin action=%s dropped_before=%d dropped_after=%d", action, before, after)
        return json_answer(
            {
                "result": said,
                "dropped_bytes_before": before,
                "dropped_bytes_after": after,
                "state": state_object(state),
            }
        )


def _is_running(state: ClusterState) -> bool:
    return any(
        record.committed_s is None and record.finished_s is None for record in state.transitions
    )
