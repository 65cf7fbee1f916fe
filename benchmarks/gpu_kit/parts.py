"""Parts of a phase: each guarded by itself, said when it begins and ends, and not done twice.

A phase writes lines of JSON: its figures, and between them where parts begin and end. They are all
that is kept, so what was found, what failed and what is left follow from one file.
"""

import contextlib
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

BEGUN, DONE, FAILED, LOST = "begun", "done", "failed", "lost"
LOST_CODE = 75
"""Exit code of a phase that has lost its device: no call of this process can work any more."""


@dataclass(frozen=True, slots=True)
class Part:
    """Something to find out that needs nothing of the other parts."""

    name: str
    work: Callable[[], object]


class PartsFailed(Exception):
    """Some parts did not work; the others were done."""


class DeviceIsLost(Exception):
    """After an error that sticks, the rest of the phase would say nothing."""


@dataclass(frozen=True, slots=True)
class Known:
    """What earlier calls have left of a phase, and which parts this one is asked for."""

    done: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    only: tuple[str, ...] = ()
    """Patterns of names, as of files; none: all."""

    @classmethod
    def of(cls, path: Path, only: Sequence[str] = ()) -> "Known":
        """By a phase's lines."""
        states = {name: one["is"] for name, one in read(path).parts.items()}
        done = frozenset(name for name, state in states.items() if state == DONE)
        return cls(done, frozenset(states) - done, tuple(only))

    def left_of(self, parts: Sequence[Part]) -> list[Part]:
        """What is to be done, in order; what failed before comes last."""
        wanted = [part for part in parts if part.name not in self.done]
        if self.only:
            wanted = [p for p in wanted if any(fnmatchcase(p.name, one) for one in self.only)]
        return sorted(wanted, key=lambda part: part.name in self.failed)


NOTHING_KNOWN = Known()


def do(
    parts: Sequence[Part],
    known: Known,
    is_alive: Callable[[], bool],
    forget: Callable[[], object] = gc.collect,
) -> None:
    """One part after the other, whatever becomes of those before; ``forget`` after each.

    Raises PartsFailed at the end if some failed, and DeviceIsLost at once where ``is_alive`` says
    after a failure that nothing can work any more.
    """
    bad: list[str] = []
    for part in known.left_of(parts):
        _say(part.name, BEGUN)
        began = time.monotonic()
        try:
            part.work()
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            why = f"{type(error).__name__}: {error}"
        else:
            _say(part.name, DONE, seconds=round(time.monotonic() - began, 2))
            continue
        finally:
            forget()  # what a failure has left may hold memory of the device
        state = FAILED if is_alive() else LOST
        _say(part.name, state, seconds=round(time.monotonic() - began, 2), why=why[:2000])
        if state == LOST:
            raise DeviceIsLost(f"{part.name}: {why}")
        bad.append(f"{part.name}: {why}")
    if bad:
        raise PartsFailed("\n".join(bad))


def _say(name: str, state: str, **more: object) -> None:
    print(json.dumps({"part": name, "is": state, **more}), flush=True)


@dataclass(slots=True)
class Lines:
    """A phase's lines in order."""

    figures: list[dict[str, Any]] = field(default_factory=list)
    """Of a part that ran several times those of its last time."""
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The last word on each part. ``begun`` is the last of one that was cut off."""

    @property
    def num_ended(self) -> int:
        """Parts of which more is known than that they began."""
        return sum(one["is"] != BEGUN for one in self.parts.values())

    @property
    def lost(self) -> str | None:
        """The part that took the device with it."""
        return next((name for name, one in self.parts.items() if one["is"] == LOST), None)


def read(path: Path) -> Lines:
    """What a phase has said so far. A process that was killed may leave half a line."""
    by_part: dict[str | None, list[dict[str, Any]]] = {}
    parts: dict[str, dict[str, Any]] = {}
    now: str | None = None
    text = path.read_text(errors="replace") if path.exists() else ""
    for line in text.splitlines():
        one = _parsed(line)
        if one is None:
            continue
        if "settings" in one:
            by_part.setdefault(now, []).append(one)
        elif "part" in one and "is" in one:
            name: str = one["part"]
            parts[name] = one
            now = name if one["is"] == BEGUN else None
            if now is not None:
                by_part[now] = []
    return Lines([figure for some in by_part.values() for figure in some], parts)


def _parsed(line: str) -> dict[str, Any] | None:
    with contextlib.suppress(json.JSONDecodeError):
        one = json.loads(line)
        if isinstance(one, dict):
            return one
    return None
