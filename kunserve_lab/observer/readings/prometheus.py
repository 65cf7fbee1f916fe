"""Readings from a Prometheus server that scrapes the fleet, by its range queries."""

import asyncio
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aiohttp

from kunserve.core.errors import ConfigError
from kunserve_lab.observer.readings.names import DIALECTS, series_names
from kunserve_lab.observer.readings.page import PageError, Reading, Series, readings_of
from kunserve_lab.observer.readings.progress import tell_tenth

MOST_POINTS = 240
"""Of a series in one answer, an hour at 15 s: what is held in memory at once."""
QUERY_S = 60.0
MOST_AT_ONCE = 4
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


def seconds_of(text: str) -> float:
    """Of a span such as ``24h``, ``90m`` or ``1d12h``. Raises ConfigError."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ConfigError(f"--since takes a span such as 24h, 90m or 1d12h, not {text!r}")
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def read_prometheus(
    url: str, since_s: float, step_s: float, until_s: float, selector: str = ""
) -> Iterator[Reading]:
    """All replicas from ``until_s - since_s`` on, in order of time, asked for as they are taken.

    ``selector`` is further label matchers, such as ``job="vllm"``. Raises ConfigError; also at the
    end, where there was nothing.
    """
    spans = _spans(until_s - since_s, until_s, step_s)
    has_some, failed = False, None
    for number, span in enumerate(spans, start=1):
        readings, error = _readings(asyncio.run(_ask(url, span, step_s, selector)))
        if len(spans) > 1:
            tell_tenth(url, number, len(spans))
        has_some, failed = has_some or bool(readings), error or failed
        yield from readings
    if not has_some:
        filtered = f" that match {selector}" if selector else ""
        raise ConfigError(
            f"{url} has no vllm: or sglang: series{filtered} in that time"
            + (f" ({failed})" if failed else ": check --since and --selector")
        )


async def _ask(
    url: str, span: tuple[float, float], step_s: float, selector: str
) -> Mapping[str, Mapping[float, Sequence[Series]]]:
    """What was scraped in a part of the time: of each replica, by moment."""
    timeout = aiohttp.ClientTimeout(total=QUERY_S)
    times = {"start": f"{span[0]:.3f}", "end": f"{span[1]:.3f}", "step": f"{step_s:g}"}
    gate = asyncio.Semaphore(MOST_AT_ONCE)
    found: dict[str, dict[float, list[Series]]] = defaultdict(lambda: defaultdict(list))
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def ask(name: str) -> None:
            query = name + (f"{{{selector}}}" if selector else "")
            async with gate:
                answer = await _get(session, url, {"query": query, **times})
            for labels, values in answer:
                for moment_s, value in values:
                    found[_replica(labels)][moment_s].append(Series(name, labels, value))

        names = [name for dialect in DIALECTS for name in series_names(dialect)]
        await asyncio.gather(*map(ask, names))
    return found


def _readings(
    found: Mapping[str, Mapping[float, Sequence[Series]]],
) -> tuple[list[Reading], PageError | None]:
    readings: list[Reading] = []
    failed = None
    for replica, moments in found.items():
        for moment_s, series in moments.items():
            try:
                readings += readings_of(series, replica, moment_s)
            except PageError as error:  # a gap: the server was not there, or had just begun
                failed = error
    return sorted(readings, key=lambda one: one.time_s), failed


def _spans(start_s: float, end_s: float, step_s: float) -> list[tuple[float, float]]:
    """The time in pieces that Prometheus answers, no moment in two of them."""
    length_s = MOST_POINTS * step_s
    number = max(1, math.ceil((end_s - start_s) / length_s))
    return [
        (start_s + at * length_s, min(end_s, start_s + (at + 1) * length_s - step_s / 2))
        for at in range(number)
    ]


def _replica(labels: Mapping[str, str]) -> str:
    return labels.get("pod") or labels.get("instance") or "server"


async def _get(
    session: aiohttp.ClientSession, url: str, params: Mapping[str, str]
) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
    path = f"{url.rstrip('/')}/api/v1/query_range"
    try:
        async with session.get(path, params=params) as answer:
            text = await answer.text(errors="replace")
    except TimeoutError:
        raise ConfigError(
            f"{path} gave no answer in {QUERY_S:g} s: ask for less (--since)"
        ) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ConfigError(
            f"no Prometheus server at {url}: {error or type(error).__name__}"
        ) from None
    try:
        body: Any = json.loads(text)
    except ValueError:
        raise ConfigError(
            f"{path} answers {answer.status} and no JSON: is it a Prometheus server?"
        ) from None
    if not isinstance(body, dict) or body.get("status") != "success":
        said = body.get("error") if isinstance(body, dict) else None
        raise ConfigError(f"{path} answers {answer.status}: {said or 'not what Prometheus says'}")
    try:
        return [
            (one["metric"], [(float(at), float(value)) for at, value in one["values"]])
            for one in body["data"]["result"]
        ]
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{path} gave no matrix of values: is it a Prometheus server?") from None
