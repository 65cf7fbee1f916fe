"""A table of attention's tiles with what was measured on one device."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TABLE = "tiles.json"
"""As ``kunserve_extras.triton_ops`` reads it: copied over its own, it serves."""
_LEAST_GAIN = 1.02
"""Less may be chance, and another order of sums would come for nothing."""

Choice = tuple[int, int, int, int]
"""Keys of a tile, warps, stages, and parts of a sequence."""


def best(seconds: Mapping[Choice, Sequence[float]], served: Choice) -> Choice:
    """The fastest by the geometric mean over all cases; what serves where little is gained.

    One that was not possible in all cases has fewer times than ``served``, and is no choice.
    """
    own = seconds[served]

    def gain(choice: Choice) -> float:
        return math.exp(
            sum(math.log(one / its) for one, its in zip(own, seconds[choice], strict=True))
            / len(own)
        )

    possible = [choice for choice, times in seconds.items() if len(times) == len(own)]
    fastest = max(possible, key=gain)
    return fastest if gain(fastest) >= _LEAST_GAIN else served


def write(
    path: Path, rows: Sequence[Mapping[str, Any]], where: Mapping[str, Any], choice: Choice
) -> None:
    """The table ``rows`` with a row first for ``where``, instead of one that it has for that."""
    keys, warps, stages, parts = choice
    row = {**where, "single": {"keys": keys, "warps": warps, "stages": stages}, "parts": parts}
    others = [one for one in rows if any(one.get(name) != where[name] for name in where)]
    text = ",\n".join(f"  {json.dumps(one)}" for one in (row, *others))
    path.write_text(f"[\n{text}\n]\n", encoding="utf-8")
