"""Reading CSV and JSONL rows, plain or gzipped, with errors that name file, line and reason."""

import csv
import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from kunserve.core.errors import ConfigError

MAX_COUNT = 10**9
"""Largest count that a file may give: no request has so many tokens."""


class WorkloadFileError(ConfigError):
    """A workload file that is missing or malformed. Names the file, the line and the reason."""

    def __init__(self, path: Path, line: int | None, reason: str) -> None:
        place = f"{path}" if line is None else f"{path}, line {line}"
        super().__init__(f"{place}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


class Row(NamedTuple):
    """One record and the line it ends on."""

    path: Path
    line: int
    values: dict[str, object]

    def number(self, column: str) -> float:
        """The column as a finite number."""
        value = self.values.get(column)
        if isinstance(value, bool) or value is None or value == "":
            raise WorkloadFileError(self.path, self.line, f"no value for {column!r}")
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            reason = f"{column!r} is not a number: {_shown(value)}"
            raise WorkloadFileError(self.path, self.line, reason) from None
        if not math.isfinite(number):
            reason = f"{column!r} is not finite: {_shown(value)}"
            raise WorkloadFileError(self.path, self.line, reason)
        return number

    def count(self, column: str) -> int:
        """The column as a whole number of at least 0."""
        number = self.number(column)
        if number > MAX_COUNT:
            reason = f"{column!r} is too large: {number:g} is more than {MAX_COUNT:,}"
            raise WorkloadFileError(self.path, self.line, reason)
        if number < 0 or number != int(number):
            reason = f"{column!r} must be a whole number of at least 0, not {number:g}"
            raise WorkloadFileError(self.path, self.line, reason)
        return int(number)

    def text(self, column: str) -> str:
        """The column as text; empty when it is absent."""
        value = self.values.get(column)
        return "" if value is None else str(value)


class Table(NamedTuple):
    """A CSV file: its column names, stripped, and its rows."""

    path: Path
    columns: tuple[str, ...]
    rows: list[Row]


def read_csv(path: Path) -> Table:
    """A CSV file with a header line. A row of another length than the header is an error."""
    try:
        with _open_text(path) as file:
            reader = csv.reader(file)
            header = tuple(name.strip() for name in next(reader, []))
            if not any(header):
                raise WorkloadFileError(path, 1, "the file is empty: a header line is needed")
            twice = [name for name in header if name and header.count(name) > 1]
            if twice:
                raise WorkloadFileError(path, 1, f"two columns are called {twice[0]!r}")
            rows = []
            for cells in reader:
                if not any(cell.strip() for cell in cells):
                    continue
                if len(cells) != len(header):
                    reason = f"{len(cells)} values where the header has {len(header)}"
                    raise WorkloadFileError(path, reader.line_num, reason)
                values: dict[str, object] = {
                    name: cell.strip() for name, cell in zip(header, cells, strict=True)
                }
                rows.append(Row(path, reader.line_num, values))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise WorkloadFileError(path, None, _why(error)) from None
    return Table(path, header, rows)


def read_jsonl(path: Path) -> list[Row]:
    """A file of one JSON object per line; empty lines are skipped."""
    rows = []
    try:
        with _open_text(path) as file:
            for line, text in _numbered(file):
                try:
                    values = json.loads(text)
                except ValueError as error:
                    raise WorkloadFileError(path, line, f"not JSON ({error})") from None
                except RecursionError:
                    raise WorkloadFileError(path, line, "nested too deeply") from None
                if not isinstance(values, dict):
                    raise WorkloadFileError(path, line, f"not a JSON object: {_shown(values)}")
                rows.append(Row(path, line, values))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise WorkloadFileError(path, None, _why(error)) from None
    return rows


def _open_text(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _numbered(file: IO[str]) -> Iterator[tuple[int, str]]:
    for line, text in enumerate(file, start=1):
        if text.strip():
            yield line, text


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return f"cannot be read ({error})"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
