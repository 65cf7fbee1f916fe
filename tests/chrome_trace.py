"""What a file must keep to for Perfetto and ``chrome://tracing`` to draw all of it.

The rules are those of the Trace Event Format; an arrow whose end lies in no slice is not drawn.
"""

import json
import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Row = tuple[int, int]

PHASES = {"X", "M", "i", "s", "t", "f"}
ARROWS = {"s", "t", "f"}
ROUNDING_US = 0.002


def check_trace(path: Path) -> list[Event]:
    """The file's events, all of which are well-formed."""
    whole = json.loads(path.read_text())
    assert whole["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = whole["traceEvents"]
    for event in events:
        _check_event(event)
    _check_names(events)
    slices = _check_slices(events)
    _check_arrows(events, slices)
    return events


def _check_event(event: Event) -> None:
    assert event["ph"] in PHASES, event
    assert isinstance(event["name"], str) and event["name"], event
    assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("pid", "tid")), event
    if event["ph"] == "M":
        return
    assert _is_time(event["ts"]), event
    if event["ph"] == "X":
        assert _is_time(event["dur"]), event
    elif event["ph"] == "i":
        assert event["s"] in ("g", "p", "t"), event
    else:
        assert event["cat"] and event["id"] is not None, event


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _check_names(events: list[Event]) -> None:
    """Every process and every row that has events has one name."""
    names: dict[tuple[str, int, int | None], str] = {}
    for event in events:
        if event["ph"] == "M":
            kind = event["name"]
            assert kind in ("process_name", "thread_name"), event
            key = (kind, event["pid"], event["tid"] if kind == "thread_name" else None)
            assert names.setdefault(key, event["args"]["name"]) == event["args"]["name"], event
    for event in events:
        assert ("process_name", event["pid"], None) in names, event
        assert ("thread_name", event["pid"], event["tid"]) in names, event


def _check_slices(events: list[Event]) -> dict[Row, list[Event]]:
    """Slices of each row in order of time, none across another's edge."""
    slices: dict[Row, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)
    for row in slices.values():
        starts = [event["ts"] for event in row]
        assert starts == sorted(starts)
        for one, after in pairwise(row):
            assert one["ts"] + one["dur"] <= after["ts"] + ROUNDING_US, (one, after)
    return slices


def _check_arrows(events: list[Event], slices: dict[Row, list[Event]]) -> None:
    """Each begins once and ends once, later, and both ends and what is between lie in slices."""
    arrows: dict[tuple[str, Any], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in ARROWS:
            arrows[event["cat"], event["id"]].append(event)
            row = slices[event["pid"], event["tid"]]
            ts = event["ts"]
            assert any(one["ts"] <= ts < one["ts"] + one["dur"] for one in row), event
    for points in arrows.values():
        points.sort(key=lambda event: event["ts"])
        phases = [event["ph"] for event in points]
        assert phases == ["s", *["t"] * (len(phases) - 2), "f"], points
        assert points[-1]["bp"] == "e", points
