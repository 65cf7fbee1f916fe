"""The map: what drops do to bursts of every height and length, by the fluid model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kunserve_lab.compare.output.table import Row
from kunserve_lab.compare.simulated.projection import HELPS
from kunserve_lab.sim.fluid import Bursts, Capacity, flow
from kunserve_lab.sim.steady import Array

HEIGHTS = (1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
"""Of bursts in the table, in X."""
LENGTHS_S = (5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0)
FINE_HEIGHTS = tuple(np.linspace(1.0, 3.2, 16).tolist())
"""Of bursts in the figure."""
FINE_LENGTHS_S = tuple(np.geomspace(5.0, 140.0, 18).tolist())
USUAL_BASE = 0.5
"""Rate before and after a burst, in X, where no traffic is given."""


@dataclass(frozen=True, slots=True)
class BurstMap:
    """Ratios of P99 TTFT, a row per height and a column per length."""

    heights: tuple[float, ...]
    lengths_s: tuple[float, ...]
    base: float
    by_drop: Array
    """Times lower with drops; the next is with endless memory."""
    by_endless: Array
    fills: npt.NDArray[np.bool_]
    """Whether memory fills at all."""
    compute_height: float
    """Above it prompts alone take all compute."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A burst on the map."""

    name: str
    height: float
    length_s: float
    by_drop: float | None = None
    """As simulated; None where only the place is known."""


def make_map(
    able: Capacity,
    base: float = USUAL_BASE,
    heights: Sequence[float] = HEIGHTS,
    lengths_s: Sequence[float] = LENGTHS_S,
) -> BurstMap:
    """Every burst of these heights and lengths. About a second."""
    height, length_s = np.meshgrid(np.array(heights), np.array(lengths_s), indexing="ij")
    bursts = Bursts(height.ravel(), length_s.ravel(), np.full(height.size, base))
    alone = flow(able, bursts, drops=False)
    dropped = flow(able, bursts, drops=True)
    endless = flow(able, bursts, drops=False, endless=True)
    return BurstMap(
        heights=tuple(heights),
        lengths_s=tuple(lengths_s),
        base=base,
        by_drop=(alone.p99_s / dropped.p99_s).reshape(height.shape),
        by_endless=(alone.p99_s / endless.p99_s).reshape(height.shape),
        fills=alone.waits_for_memory.reshape(height.shape),
        compute_height=able.compute_rate / able.full_rate,
    )


def map_rows(drawn: BurstMap) -> list[Row]:
    """The map as a table, head first, the highest bursts on top."""
    rows: list[Row] = [("burst", *(f"{length_s:g} s" for length_s in drawn.lengths_s))]
    for at in reversed(range(len(drawn.heights))):
        cells = (_cell(drawn, at, column) for column in range(len(drawn.lengths_s)))
        rows.append((f"{drawn.heights[at]:g} X", *cells))
    return rows


def _cell(drawn: BurstMap, row: int, column: int) -> str:
    if not drawn.fills[row, column]:
        return "."
    by_drop, by_endless = drawn.by_drop[row, column], drawn.by_endless[row, column]
    return f"{by_drop:.1f}/{by_endless:.1f}{'*' if by_drop >= HELPS else ''}"


LEGEND = (
    f"P99 TTFT: times lower with drops / with endless memory. * drops help {HELPS:g}x or more. "
    ". memory never fills."
)
