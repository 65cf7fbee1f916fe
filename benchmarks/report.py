"""Figures of a benchmark: a line of JSON each on standard output, and one table on stderr.

Every line has the same keys, so that results of all benchmarks can be read, joined and compared
by one program: ``benchmark``, ``name``, ``value``, ``unit``, ``settings`` and ``commit``. Those
that are simulated and kept also say of which ``code`` they are (``simulated_code``).
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kunserve_lab.bench.environment import environment

Setting: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured or computed number, and under which settings."""

    name: str
    value: float | None
    """None where there was nothing to measure."""
    unit: str
    settings: dict[str, Setting]


class Report:
    """Collects the figures of one benchmark. A context: the table is printed at its end."""

    def __init__(self, benchmark: str, code: str | None = None, /, **settings: Setting) -> None:
        self._benchmark = benchmark
        self._code = {} if code is None else {"code": code}
        self._common = settings
        """Settings that every figure has. The table shows them above its head."""
        self._commit = environment()["commit"]
        self._figures: list[Figure] = []

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, *_: object) -> None:
        if self._figures:
            print(f"\n{self.table()}", file=sys.stderr, flush=True)

    def add(self, name: str, value: float | None, unit: str, /, **settings: Setting) -> None:
        """One figure, said at once: a run that is broken off has told what it had."""
        figure = Figure(name, value, unit, settings)
        self._figures.append(figure)
        line = {
            "benchmark": self._benchmark,
            "name": name,
            "value": None if value is None else _rounded(value),
            "unit": unit,
            "settings": self._common | settings,
            "commit": self._commit,
            **self._code,
        }
        print(json.dumps(line), flush=True)

    def table(self) -> str:
        """The common settings, and ``tables_of`` all figures."""
        common = ", ".join(f"{key} {_shown(value)}" for key, value in self._common.items())
        head = f"{self._benchmark}: {common}" if common else self._benchmark
        return "\n\n".join([head, *tables_of(self._figures)])


def tables_of(figures: Sequence[Figure]) -> list[str]:
    """A row for each combination of settings, a column for each name of a figure.

    Figures with other settings than those before make a table of their own.
    """
    parts: dict[tuple[str, ...], list[Figure]] = {}
    for figure in figures:
        parts.setdefault(tuple(figure.settings), []).append(figure)
    return [_part(some) for some in parts.values()]


def _part(figures: list[Figure]) -> str:
    """The table of figures that have the same settings."""
    keys = list(figures[0].settings)
    columns = list(dict.fromkeys((figure.name, figure.unit) for figure in figures))
    rows: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
    for figure in figures:
        place = tuple(_shown(value) for value in figure.settings.values())
        cell = "-" if figure.value is None else f"{_rounded(figure.value):,g}"
        rows.setdefault(place, {})[figure.name, figure.unit] = cell
    lines = [[*keys, *(f"{name} ({unit})" if unit else name for name, unit in columns)]]
    lines += [[*place, *(cells.get(c, "") for c in columns)] for place, cells in rows.items()]
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at < len(keys) else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _rounded(value: float) -> float:
    """Four digits that count: no benchmark here is better than that."""
    return float(f"{value:.4g}")


def _shown(value: Setting) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
