"""What if a drop freed only a part of the layers that it can? Simulated, against whole drops.

    python -m benchmarks.graded_drops >> benchmarks/results/graded_drops.jsonl
    python -m benchmarks.graded_drops --table

Members of a pair then hold overlapping layers and compute half of them each, as they do now. So
a graded drop differs from a whole one in two things only: it frees less memory, and a restore
loads less. Both are the bytes of a dropped layer, so a layer of which half the bytes are dropped
stands for two of which one is. Whole drops are those that `benchmarks.targets` and
`benchmarks.parting` keep. A run that the results have is not run again, but with `--again` if it
is of other code.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from benchmarks.markdown import Row, markdown
from benchmarks.parting import BENCHMARK as PARTING
from benchmarks.points import (
    HEAVY_27,
    LONGBENCH_40,
    LONGBENCH_44,
    SHAREGPT_15,
    Point,
    RunKey,
    kept,
    run_missing,
    with_codes,
)
from benchmarks.targets import BENCHMARK as TARGETS
from kunserve_lab.compare.simulated.scenario import Scenario

BENCHMARK = "graded_drops"
SHARE = 0.5
"""Of the layers that a drop could free: a member of a pair drops a quarter of the model."""
POINTS = (LONGBENCH_40, LONGBENCH_44, SHAREGPT_15, HEAVY_27)
"""From the smallest need of memory to the largest."""
SHOWN = (
    *(("P50 TTFT", "s"), ("P99 TTFT", "s"), ("P50 TPOT", "ms"), ("output", "tokens/s")),
    *(("drops", ""), ("in pipelines", "s"), ("loading", "s")),
)


@dataclass(frozen=True)
class Graded(Point):
    """A point where a dropped layer gives a part of its bytes."""

    def scenario(self, seed: int) -> Scenario:
        """See ``Point``."""
        whole = Point.scenario(self, seed)
        spec = whole.profile.spec
        graded = replace(spec, layer_bytes=round(SHARE * spec.layer_bytes))
        return replace(whole, profile=replace(whole.profile, spec=graded))


def _runs(num_seeds: int) -> Iterator[tuple[Point, int, str]]:
    for seed in range(num_seeds):
        for point in POINTS:
            yield Graded(*(getattr(point, field.name) for field in fields(Point))), seed, "drop"


def table() -> list[Row]:
    """Whole -> graded, of each draw that both have."""
    whole, graded = kept(PARTING) | kept(TARGETS), kept(BENCHMARK)
    units = (f"{name} ({unit})" if unit else name for name, unit in SHOWN)
    rows: list[Row] = [("load, draw", *units)]
    codes: list[set[str]] = []
    for point in POINTS:
        for key in sorted(graded):
            before = whole.get(RunKey(point.name, key.seed, "drop"))
            if key.point != point.name or before is None:
                continue
            after = graded[key]
            cells = (
                f"{before.figures.get(name, 0):.4g} -> {after.figures.get(name, 0):.4g}"
                for name, _ in SHOWN
            )
            rows.append((f"{point.name}, {key.seed}", *cells))
            codes.append({before.code, after.code})
    return with_codes(rows, codes)


def main() -> None:
    """Every run that is missing, or the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1, help="draws of each point")
    parser.add_argument("--again", action="store_true", help="also what is kept of other code")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is kept")
    options = parser.parse_args()
    if options.table:
        print(markdown(table()))
    else:
        run_missing(BENCHMARK, _runs(options.seeds), kept(BENCHMARK), again=options.again)


if __name__ == "__main__":
    main()
