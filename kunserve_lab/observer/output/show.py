"""What the observer says while it watches: a table that stays in place, lines, or JSON lines."""

import json
import sys
import time
from collections.abc import Mapping
from typing import IO, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from kunserve_lab.observer.episodes.story import as_json, comparison, sentence
from kunserve_lab.observer.episodes.what_if import Judged
from kunserve_lab.observer.watch import FleetView, ReplicaView

HEADS = ("replica", "KV", "demand", "running", "waiting", "req/s", "full in", "state")
LINE_EVERY_S = 10.0
"""Of plain lines, while nothing changes."""


class Shower(Protocol):
    """Where it is said."""

    def show(self, view: FleetView, errors: Mapping[str, str]) -> None:
        """The fleet now, and why servers do not answer."""

    def tell(self, judged: Judged) -> None:
        """An episode that is over."""

    def close(self) -> None:
        """Nothing more comes."""


def shower_of(as_json_lines: bool, out: IO[str]) -> Shower:
    """The one that fits what is written to."""
    if as_json_lines:
        return JsonLines(out)
    return LiveTable(out) if out.isatty() else PlainLines(out)


class JsonLines:
    """An object a line: ``{"view": ...}`` each period, ``{"episode": ...}`` after each burst."""

    def __init__(self, out: IO[str] = sys.stdout) -> None:
        self._out = out

    def show(self, view: FleetView, errors: Mapping[str, str]) -> None:
        """See ``Shower``."""
        self._write({"view": view_json(view), "errors": dict(errors)})

    def tell(self, judged: Judged) -> None:
        """See ``Shower``."""
        self._write({"episode": as_json(judged)})

    def close(self) -> None:
        """See ``Shower``."""
        self._out.flush()

    def _write(self, value: dict[str, object]) -> None:
        self._out.write(json.dumps(value) + "\n")
        self._out.flush()


class PlainLines:
    """A line when something changes, and every `LINE_EVERY_S`."""

    def __init__(self, out: IO[str] = sys.stdout) -> None:
        self._out = out
        self._said: tuple[object, ...] = ()
        self._said_s = -LINE_EVERY_S

    def show(self, view: FleetView, errors: Mapping[str, str]) -> None:
        """See ``Shower``."""
        state = (tuple(one.state for one in view.replicas), tuple(errors.values()))
        if state == self._said and view.time_s - self._said_s < LINE_EVERY_S:
            return
        if errors and state[1:] != self._said[1:]:
            for text in errors.values():
                self._line(f"{_clock(view.time_s)}  {text}")
        self._said, self._said_s = state, view.time_s
        self._line(fleet_line(view))
        for text in view.decided:
            self._line(f"          would {text}")

    def tell(self, judged: Judged) -> None:
        """See ``Shower``."""
        for line in story_lines(judged):
            self._line(line)

    def close(self) -> None:
        """See ``Shower``."""
        self._out.flush()

    def _line(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()


class LiveTable:
    """A row for each replica, redrawn in place; episodes stay above it."""

    def __init__(self, out: IO[str] = sys.stdout) -> None:
        self._console = Console(file=out)
        self._live = Live(console=self._console, refresh_per_second=4)

    def show(self, view: FleetView, errors: Mapping[str, str]) -> None:
        """See ``Shower``."""
        table = Table(title=fleet_line(view), title_justify="left", title_style="bold")
        for head in HEADS:
            table.add_column(head, justify="left" if head in ("replica", "state") else "right")
        for one in view.replicas:
            style = "dim" if one.is_stale else "red" if one.state != "well" else ""
            table.add_row(*cells(one), style=style)
        table.caption = "\n".join([*view.texts, *errors.values()]) or None
        self._live.start()  # not before: what goes wrong first would leave a terminal changed
        self._live.update(table)

    def tell(self, judged: Judged) -> None:
        """See ``Shower``."""
        for line in story_lines(judged):
            self._console.print(line, highlight=False, markup=False)

    def close(self) -> None:
        """See ``Shower``."""
        self._live.stop()


def story_lines(judged: Judged) -> list[str]:
    """The sentence, and what is to be known beside it."""
    return [f"{sentence(judged)}.", *(f"    {line}" for line in comparison(judged))]


def amount(number: int, noun: str) -> str:
    """Such as ``1 replica``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def fleet_line(view: FleetView) -> str:
    """The whole fleet in a line."""
    present = view.present
    stale = len(view.replicas) - len(present)
    parts = [_clock(view.time_s), amount(len(present), "replica")]
    if stale:
        parts.append(f"{stale} without an answer")
    if present:
        usage = sum(one.kv_usage for one in present) / len(present)
        demand = sum(one.demand for one in present) / len(present)
        parts += [
            f"KV {usage:.0%}, demand {demand:.0%}",
            f"{sum(o.num_running for o in present)} running, "
            f"{sum(o.num_waiting for o in present)} waiting",
            f"{sum(one.arrivals_per_s for one in present):.1f} req/s",
            f"prompts take {view.prompt_share:.0%} of compute",
        ]
    memory = sum(one.memory_short for one in present)
    compute = sum(one.compute_short for one in present)
    if memory:
        parts.append(f"memory short on {memory}")
    if compute:
        parts.append(f"compute short on {compute}")
    if not memory and view.full_in_s is not None:
        parts.append(f"memory full in {view.full_in_s:.0f} s")
    if not compute and view.busy_in_s is not None:
        parts.append(f"compute full in {view.busy_in_s:.0f} s")
    if view.drops.num_requests_now:
        parts.append(f"a drop would run {view.drops.num_requests_now} more now")
    return "; ".join(parts)


def view_json(view: FleetView) -> dict[str, object]:
    """For programs. Shares are 0 to 1."""
    names = ReplicaView.__dataclass_fields__
    return {
        "time_s": view.time_s,
        "full_in_s": view.full_in_s,
        "busy_in_s": view.busy_in_s,
        "prompt_share": round(view.prompt_share, 4),
        "drops_decided": view.drops.num_drops,
        "requests_more_now": view.drops.num_requests_now,
        "replicas": [
            {name: getattr(one, name) for name in names} | {"state": one.state}
            for one in view.replicas
        ],
    }


def cells(one: ReplicaView) -> tuple[str, ...]:
    """A replica's row under `HEADS`."""
    full = "-" if one.full_in_s is None else f"{one.full_in_s:.0f} s"
    state = f"no answer for {one.age_s:.0f} s" if one.is_stale else one.state
    return (
        one.name,
        f"{one.kv_usage:.0%}",
        f"{one.demand:.0%}",
        str(one.num_running),
        str(one.num_waiting),
        f"{one.arrivals_per_s:.1f}",
        full,
        state,
    )


def _clock(moment_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment_s))
