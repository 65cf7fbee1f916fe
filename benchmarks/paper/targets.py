"""How near are the simulated clusters to what we want of a burst? Ours beside targets.

    python -m benchmarks.paper.targets [--seeds N] >> benchmarks/results/targets.jsonl
    python -m benchmarks.paper.targets --table

P99 TTFT of the rivals over that of `drop`, by default and with the option that suits the traffic:
medians over draws of arrivals and lengths, with the least and the most. A run that the results
have is not run again, but with `--again` if it is of other code. `--unseen` runs windows of
Azure's trace that nothing was tuned on, though rules have been held against them since (the test
set is `benchmarks.paper.test_set`'s); they need `azure-2023-conv` and `azure-2023-code`, which are
downloaded. Five draws of all take about an hour of one core.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from benchmarks.markdown import Row, markdown
from benchmarks.paper.points import (
    BURSTGPT_48,
    HEAVY_27,
    HEAVY_30,
    LONGBENCH_44,
    LONGBENCH_48,
    LONGBENCH_72B_46,
    SHAREGPT_15,
    UNSEEN,
    KeptRun,
    Point,
    RunKey,
    kept,
    run_missing,
    with_codes,
)

BENCHMARK = "targets"
PARTING = "parting"
"""Has kept runs of `drop` at equal points."""
RIVALS = ("recompute", "recompute-rr", "endless")
P99 = "P99 TTFT"
Draw: TypeAlias = dict[str, KeptRun]
"""Every system on equal requests."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is wanted at one point. None: nothing is."""

    point: Point
    options: tuple[str, ...]
    """Systems with the options that suit the traffic."""
    over_recompute: float | None = None
    """Times lower that P99 TTFT shall be; as is the next."""
    over_round_robin: float | None = None


ORDERED = ("drop-tpot",)
PARKED = ("drop-tpot-park",)
TARGETS = (
    Target(LONGBENCH_44, PARKED, 3.1, 6.0),
    Target(LONGBENCH_48, PARKED, 3.3),
    Target(HEAVY_27, ORDERED, 8.3, 16.0),
    Target(HEAVY_30, ORDERED, 10.0, 21.0),
    Target(SHAREGPT_15, ORDERED, 3.5),
    Target(LONGBENCH_72B_46, ORDERED, 2.7),
    Target(BURSTGPT_48, ORDERED, 3.0),
)
UNSEEN_TARGETS = tuple(
    Target(point, PARKED if point.experiment == LONGBENCH_44.experiment else ()) for point in UNSEEN
)
HEAD = (
    *("load", "system", "against recompute", "against round robin", "of endless"),
    *("P50 TPOT", "output tokens/s"),
)


def _kept() -> dict[RunKey, KeptRun]:
    """Of this benchmark, and of that one."""
    return kept(PARTING) | kept(BENCHMARK)


def table(targets: Sequence[Target]) -> list[Row]:
    """A row for each point and system of ours; the last two columns are against recompute.

    Each ratio is of as many draws as both systems have.
    """
    runs = _kept()
    rows: list[Row] = [HEAD]
    codes: list[set[str]] = []
    for target in targets:
        name = target.point.name
        for system in ("drop", *target.options):
            draws: list[Draw] = [{} for _ in range(1 + max((key.seed for key in runs), default=0))]
            for key, run in runs.items():
                if key.point == name:
                    draws[key.seed][key.system] = run
            if not any({"recompute", system} <= draw.keys() for draw in draws):
                continue
            rows.append(
                (
                    *(name, f"`{system}`"),
                    _times(_over(draws, "recompute", system, P99), target.over_recompute),
                    _times(_over(draws, "recompute-rr", system, P99), target.over_round_robin),
                    _times(_over(draws, system, "endless", P99), None, digits=2),
                    _middle(_over(draws, system, "recompute", "P50 TPOT")),
                    _middle(_over(draws, system, "recompute", "output")),
                )
            )
            compared = {system, *RIVALS}
            codes.append(
                {run.code for draw in draws for one, run in draw.items() if one in compared}
            )
    return with_codes(rows, codes)


def targets() -> list[Row]:
    """What is wanted, and what is."""
    return table(TARGETS)


def unseen() -> list[Row]:
    """The same on windows that nothing was tuned on: nothing was asked of each by itself."""
    return table(UNSEEN_TARGETS)


def _over(draws: list[Draw], one: str, other: str, figure: str) -> list[float]:
    both = [draw for draw in draws if {one, other} <= draw.keys()]
    return [draw[one].figures[figure] / draw[other].figures[figure] for draw in both]


def _times(ratios: list[float], wanted: float | None, digits: int = 1) -> str:
    if not ratios:
        return "-"
    shown = [f"{f(ratios):.{digits}f}" for f in (statistics.median, min, max)]
    middle, least, most = shown
    ranged = f"{middle}x" if least == most else f"{middle}x ({least}-{most})"
    return ranged if wanted is None else f"{ranged} of {wanted:g}x"


def _middle(ratios: list[float]) -> str:
    return f"{100 * (statistics.median(ratios) - 1):+.0f} %" if ratios else "-"


def runs_of(targets: Sequence[Target], seeds: Sequence[int]) -> Iterator[tuple[Point, int, str]]:
    """A draw of every point before the next draw."""
    for seed in seeds:
        for target in targets:
            for system in (*RIVALS, "drop", *target.options):
                yield target.point, seed, system


def main() -> None:
    """Every run that is missing, or the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="draws of each point")
    parser.add_argument("--unseen", action="store_true", help="windows that nothing was tuned on")
    parser.add_argument("--again", action="store_true", help="also what is kept of other code")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is kept")
    options = parser.parse_args()
    if options.table:
        print(markdown(unseen() if options.unseen else targets()))
        return
    wanted = UNSEEN_TARGETS if options.unseen else TARGETS
    run_missing(BENCHMARK, runs_of(wanted, range(options.seeds)), _kept(), again=options.again)


if __name__ == "__main__":
    main()
