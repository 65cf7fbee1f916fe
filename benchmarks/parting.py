"""What is gained when pipelines part earlier? Simulated, `drop` with other restores.

    python -m benchmarks.parting >> benchmarks/results/parting.jsonl
    python -m benchmarks.parting --table

A run that the results have is not run again, but with `--again` if it is of other code. Per system
the median over seeds of what it takes against `drop` on equal requests, and the worst seed. `in
pipelines` is the time that an instance stands in a pipeline; `loading` is the longest time from a
restore's decision to its commit.

`drop-halves` (fours part into pairs first) and `drop-eager` (`restore_below` 0.9, fours into pairs
likewise) are kept as they ran at 041a964: they lost, and their code is gone.
"""

import argparse
import statistics
from collections.abc import Iterator

from benchmarks.markdown import Row, markdown
from benchmarks.points import (
    HEAVY_27,
    HEAVY_30,
    LONGBENCH_44,
    LONGBENCH_48,
    SHAREGPT_15,
    SMOLLM2_75,
    SMOLLM2_95,
    KeptRun,
    Point,
    RunKey,
    kept,
    run_missing,
    with_codes,
)

BENCHMARK = "parting"
BASE = "drop"
SYSTEMS = ("drop-early",)
GONE = ("drop-halves", "drop-eager")
"""They have results, and no code any more."""
POINTS = (*(SMOLLM2_95, SMOLLM2_75, HEAVY_27, LONGBENCH_44, HEAVY_30, SHAREGPT_15, LONGBENCH_48),)
RATIOS = ("P99 TTFT", "P50 TTFT", "P50 TPOT", "P99 TPOT", "output", "in pipelines")


def _runs(num_seeds: int) -> Iterator[tuple[Point, int, str]]:
    """A draw of every point before the next draw."""
    for seed in range(num_seeds):
        for point in POINTS:
            for system in (BASE, *SYSTEMS):
                yield point, seed, system


def table() -> list[Row]:
    """Each point and system: ratios to `drop` as median (least-most), and drops."""
    runs = kept(BENCHMARK)
    rows: list[Row] = [("point", "system", "seeds", "drops", *RATIOS)]
    codes: list[set[str]] = []
    for point in dict.fromkeys(key.point for key in runs):
        for system in (*GONE, *SYSTEMS):
            pairs = [
                (runs[RunKey(point, seed, BASE)], runs[RunKey(point, seed, system)])
                for seed in sorted({key.seed for key in runs})
                if {RunKey(point, seed, BASE), RunKey(point, seed, system)} <= runs.keys()
            ]
            if not pairs:
                continue
            base, ours = (
                "/".join(f"{one.figures['drops']:g}" for one in some)
                for some in zip(*pairs, strict=True)
            )
            cells = (_cell(pairs, name) for name in RATIOS)
            rows.append((point, system, str(len(pairs)), f"{base} -> {ours}", *cells))
            codes.append({one.code for pair in pairs for one in pair})
    return with_codes(rows, codes)


def _cell(pairs: list[tuple[KeptRun, KeptRun]], name: str) -> str:
    ratios = [
        ours.figures.get(name, 0.0) / before
        for base, ours in pairs
        if (before := base.figures.get(name))
    ]
    if not ratios:
        return "-"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def main() -> None:
    """Every run that is missing, or the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="draws of each point")
    parser.add_argument("--again", action="store_true", help="also what is kept of other code")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is kept")
    options = parser.parse_args()
    if options.table:
        print(markdown(table()))
    else:
        run_missing(BENCHMARK, _runs(options.seeds), kept(BENCHMARK), again=options.again)


if __name__ == "__main__":
    main()
