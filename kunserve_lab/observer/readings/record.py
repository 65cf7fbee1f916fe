"""Readings in a file: a line of JSON each, so that what was seen can be judged again."""

import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from kunserve.core.errors import ConfigError
from kunserve_lab.observer.readings.page import Reading
from kunserve_lab.observer.readings.progress import tell_tenth

LONG = 10_000
"""Readings, from which on it is said how far one has come: a day of four servers takes minutes."""
_DECODER = msgspec.json.Decoder(Reading)


class Recorder:
    """Appends readings to a file, in whole lines. One that was cut before goes on in a new line."""

    def __init__(self, path: Path) -> None:
        self.error: str | None = None
        """Why nothing is written any more: the disk is full, say."""
        self._path = path
        try:
            self._file: IO[bytes] = path.open("a+b", buffering=0)
            if self._file.seek(0, os.SEEK_END) and not self._ends_in_newline():
                self._file.write(b"\n")
        except OSError as error:
            raise ConfigError(f"--record {path}: {error.strerror}") from None

    def write(self, readings: Iterable[Reading]) -> None:
        """Add them to the file, until that fails: what watches goes on without it."""
        lines = b"".join(msgspec.json.encode(one) + b"\n" for one in readings)
        while lines and self.error is None:
            try:
                lines = lines[self._file.write(lines) :]
            except OSError as error:
                self.error = f"--record {self._path}: {error.strerror}; nothing more is recorded"

    def close(self) -> None:
        """Nothing is written after this."""
        self._file.close()

    def _ends_in_newline(self) -> bool:
        self._file.seek(-1, os.SEEK_END)
        return self._file.read(1) == b"\n"


class Record:
    """A file of `Recorder`'s. Its readings are decoded as they are asked for, in order of time:
    those of a day in a large fleet would fill a laptop's memory.
    """

    def __init__(self, path: Path) -> None:
        """Finds where they lie. Raises ConfigError."""
        self.num_left_out = 0
        """Lines that were cut."""
        self._path = path
        times_s, offsets, gaps_s = array("d"), array("q"), array("d")
        last: dict[str, float] = {}
        reason = "it is empty"
        try:
            with path.open("rb") as file:
                at = 0
                for line in file:
                    try:
                        one = _DECODER.decode(line)
                    except msgspec.MsgspecError as error:
                        self.num_left_out += 1
                        reason = str(error)
                    else:
                        times_s.append(one.time_s)
                        offsets.append(at)
                        if one.replica in last:
                            gaps_s.append(one.time_s - last[one.replica])
                        last[one.replica] = one.time_s
                    at += len(line)
        except OSError as error:
            raise ConfigError(f"--from {path}: {error.strerror}") from None
        if not times_s or self.num_left_out > len(times_s):
            raise ConfigError(
                f"{path} has hardly a reading ({reason}): expected a file of "
                "`kunserve observe --record`"
            )
        self._offsets = [offsets[at] for at in np.argsort(times_s, kind="stable")]
        self.period_s = max(0.1, sorted(gaps_s)[len(gaps_s) // 2]) if gaps_s else 1.0
        """Between two readings of one replica: the median, at least a tenth of a second."""

    def __iter__(self) -> Iterator[Reading]:
        number = len(self._offsets)
        try:
            with self._path.open("rb") as file:
                for done, at in enumerate(self._offsets, start=1):
                    file.seek(at)
                    yield _DECODER.decode(file.readline())
                    if number >= LONG:
                        tell_tenth(self._path, done, number)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"--from {self._path} was changed while it was read: {error}"
            ) from None


def by_moment(readings: Iterable[Reading], period_s: float) -> Iterator[list[Reading]]:
    """Readings in order of time as groups of one look each: within half a period of the first."""
    group: list[Reading] = []
    for one in readings:
        is_next = bool(group) and (
            one.time_s - group[0].time_s >= period_s / 2
            or any(one.replica == other.replica for other in group)
        )
        if is_next:
            yield group
            group = []
        group.append(one)
    if group:
        yield group
