"""``GET /kunserve/timeline``: samples of this front, or of the server that it is a part of."""

import math
from typing import Protocol, runtime_checkable

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from kunserve.core.errors import InvalidRequest
from kunserve.server.api.front import Front
from kunserve_extras.dashboard.timeline import Timeline


@runtime_checkable
class TimelineSource(Protocol):
    """Accounts of a server of several fronts: it has the samples."""

    async def timeline(self, since_s: float | None) -> bytes:
        """In JSON: what came after that moment, or all."""
        ...


class OwnTimeline:
    """Of the only front."""

    def __init__(self, front: Front) -> None:
        self._timeline = Timeline(front.metrics)
        front.sampler.watchers.append(self._timeline.sample)

    async def timeline(self, since_s: float | None) -> bytes:
        """See ``TimelineSource``."""
        return self._timeline.view(since_s)


class TimelineRoute:
    """One endpoint."""

    def __init__(self, front: Front) -> None:
        accounts: object = front.accounts
        self._source = accounts if isinstance(accounts, TimelineSource) else OwnTimeline(front)

    async def timeline(self, http: HttpRequest) -> Response:
        """GET /kunserve/timeline, optionally only what came after ``?since=<t_s>``."""
        since = http.query_params.get("since")
        since_s: float | None = None
        if since is not None:
            try:
                since_s = float(since)
            except ValueError:
                since_s = math.nan
            if not math.isfinite(since_s):
                raise InvalidRequest("`since` must be a number of seconds.", "since")
        return Response(await self._source.timeline(since_s), media_type="application/json")
