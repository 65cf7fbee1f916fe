"""Tiles of attention by device: what the first row of ``tiles.json`` says that fits.

``keys`` and ``parts`` decide in which order keys are added up, and so bits of results. A process
reads them once. Devices whose results are to agree bit by bit need the same ones.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from kunserve.core.errors import ConfigError
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.ops.table import most_parts

_LEAST_ROWS = 16
"""Tensor cores multiply tiles of at least so many rows."""
LEAST_PART_KEYS = 256
"""Shorter parts would write more sums than they save time. A multiple of all ``keys``."""
_TABLE = Path(__file__).with_name("tiles.json")

Row: TypeAlias = Mapping[str, Any]
"""For which devices, types and heads (a row without one of these is for all), and what: any of
``several``, ``single`` and ``parts``."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How much one program of attention holds at a time, and with how many threads."""

    rows: int
    """Queries times heads of a group."""
    keys: int
    num_warps: int
    num_stages: int
    """Tiles of keys on their way at once, and the one that is computed."""


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """For sequences of several tokens, and for those of one."""

    several: Tile
    single: Tile
    parts: int
    """Of the keys of a sequence of one token, at most."""


def table_rows() -> list[Row]:
    """The table that is installed. Its default rows fit registers and shared memory of compute
    capability 9.0 without spilling; products in float32 use no tensor cores but registers, so
    their tiles are small.
    """
    rows: list[Row] = json.loads(_TABLE.read_text(encoding="utf-8"))
    return rows


def row_of(spec: ModelSpec, device_name: str) -> dict[str, Any]:
    """For which device and models a row is that was measured there with ``spec``."""
    return {
        "device": device_name,
        "precision": _precision(spec),
        "head_dim": spec.head_dim,
        "kv_heads": spec.num_kv_heads,
    }


def tiles_for(
    spec: ModelSpec, device_name: str = "", rows: Iterable[Row] | None = None
) -> AttentionTiles:
    """What ``rows`` (by default the installed table) have for a model on a device of that name.

    Raises ConfigError where a row holds what the kernels cannot do.
    """
    found: dict[str, Any] = {"parts": most_parts(spec)}
    fitting = [row for row in rows or table_rows() if _fits(row, spec, device_name)]
    for row in reversed(fitting):
        found |= {what: row[what] for what in ("several", "single", "parts") if what in row}
    group_rows = max(_LEAST_ROWS, _power_of_two(spec.num_heads // spec.num_kv_heads))
    several, single, parts = found["several"], found["single"], found["parts"]
    for keys in (several["keys"], single["keys"]):
        if keys < 16 or LEAST_PART_KEYS % keys:
            raise ConfigError(f"{_TABLE.name}: {keys} keys do not divide {LEAST_PART_KEYS}")
    if parts != _power_of_two(parts) or parts > most_parts(spec):
        raise ConfigError(
            f"{_TABLE.name}: {parts} parts are no power of two up to {most_parts(spec)}"
        )
    return AttentionTiles(
        _tile(several, max(several["rows"], group_rows)), _tile(single, group_rows), parts
    )


def _tile(said: Row, num_rows: int) -> Tile:
    return Tile(num_rows, said["keys"], said["warps"], said["stages"])


def _fits(row: Row, spec: ModelSpec, device_name: str) -> bool:
    own = row_of(spec, device_name)
    is_same = all(row.get(what, value) == value for what, value in own.items())
    return is_same and spec.head_dim <= row.get("most_head_dim", spec.head_dim)


def _precision(spec: ModelSpec) -> str:
    return "float32" if spec.dtype == "float32" else "half"


def _power_of_two(number: int) -> int:
    """The smallest that is not below."""
    return 1 << max(0, number - 1).bit_length()
