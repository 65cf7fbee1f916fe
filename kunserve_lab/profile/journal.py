"""What has been measured so far, a line of JSON each, so that a profile can be resumed."""

from pathlib import Path

import msgspec

from kunserve.core.errors import ConfigError
from kunserve.model.profile import ProfileSubject
from kunserve_lab.profile.shapes import BatchShape
from kunserve_lab.profile.stopwatch import Reading


class Plan(msgspec.Struct, frozen=True):
    """First line: what the lines after it belong to."""

    subject: ProfileSubject
    num_repeats: int
    shapes: list[BatchShape]


class Measurement(msgspec.Struct, frozen=True):
    """One repeat of one shape."""

    shape: int
    """Index into the plan's shapes."""
    seconds: float
    wall_s: float


class Journal:
    """Owner of one file of measurements. A file of another plan is begun anew."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.found: list[list[Reading]] = [[] for _ in plan.shapes]
        """What was measured of each shape."""
        header = msgspec.json.encode(plan)
        lines = path.read_bytes().splitlines() if path.exists() else []
        is_same = bool(lines) and lines[0] == header
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.write(header + b"\n")
                for line in lines[1:] if is_same else []:
                    if self._take(line):
                        file.write(line + b"\n")
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        self._path = path

    @property
    def num_measured(self) -> int:
        """Measurements there are."""
        return sum(len(readings) for readings in self.found)

    def note(self, shape: int, reading: Reading) -> None:
        """Add one, at once on disk."""
        line = msgspec.json.encode(Measurement(shape, *reading))
        self._take(line)
        self._file.write(line + b"\n")

    def close(self) -> None:
        """Keep the file: the profile goes on another time."""
        self._file.close()

    def remove(self) -> None:
        """The profile is written; the file has served."""
        self._file.close()
        self._path.unlink()

    def _take(self, line: bytes) -> bool:
        try:
            noted = msgspec.json.decode(line, type=Measurement)
        except msgspec.MsgspecError:
            return False  # cut off when the last run ended
        self.found[noted.shape].append(Reading(noted.seconds, noted.wall_s))
        return True
