"""Readings in a file: a line of JSON each, so that what was seen can be judged again."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from kunserve.core.errors import ConfigError
from kunserve_lab.observer.readings.page import Reading


class Recorder:
    """Appends readings to a file. Each line is written whole, so a cut file can be read."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: IO[bytes] = path.open("ab")
        except OSError as error:
            raise ConfigError(f"--record {path}: {error.strerror}") from None

    def write(self, readings: Iterable[Reading]) -> None:
        """Add them to the file, and to the disk's queue."""
        for one in readings:
            self._file.write(msgspec.json.encode(one) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing is written after this."""
        self._file.close()


def read_record(path: Path) -> list[Reading]:
    """In order of time. Raises ConfigError. A last line that was cut is left out."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--from {path}: {error.strerror}") from None
    decoder = msgspec.json.Decoder(Reading)
    readings = []
    for number, line in enumerate(lines, start=1):
        try:
            readings.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            if number == len(lines):
                break
            raise ConfigError(
                f"{path}, line {number}: {error}. Expected a file of `kunserve observe --record`"
            ) from None
    if not readings:
        raise ConfigError(f"{path} has no reading: expected a file of `kunserve observe --record`")
    return sorted(readings, key=lambda one: one.time_s)


def by_moment(readings: Sequence[Reading], period_s: float) -> Iterator[list[Reading]]:
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


def usual_period_s(readings: Sequence[Reading]) -> float:
    """Between two readings of one replica: the median, at least a tenth of a second."""
    last: dict[str, float] = {}
    gaps = []
    for one in readings:
        if one.replica in last:
            gaps.append(one.time_s - last[one.replica])
        last[one.replica] = one.time_s
    return max(0.1, sorted(gaps)[len(gaps) // 2]) if gaps else 1.0
