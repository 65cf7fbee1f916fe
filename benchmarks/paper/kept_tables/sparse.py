"""The tables of docs/sparse-models.md."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.paper.kept_results import RESULTS, signed
from benchmarks.paper.sparse_models import NAMES, kept, p99_s
from kunserve_lab.compare.groups import AtLoad, by_load
from kunserve_lab.compare.results import RunResult, load

Row = Sequence[str]
SHOWN = ("recompute", "drop", "endless")


def sparse_instances() -> list[Row]:
    """What each cluster is: memory, what fills it, and where the time of a step goes."""
    found = kept()
    rows: list[Row] = [
        (
            *("", "weights, of memory", "requests that fill it", "X (requests/s)"),
            *("prompts alone take all compute at", "decode step: for weights"),
            "a pair: KV, throughput",
        )
    ]
    for name, title in NAMES.items():
        gained = [signed(found[name, None, f"{what} gained, 2"]) for what in ("KV", "throughput")]
        rows.append(
            (
                title,
                f"{found[name, None, 'weights']:.0f} %",
                f"{found[name, None, 'requests that fill it']:.0f}",
                f"{found[name, None, 'X']:.1f}",
                f"{found[name, None, 'compute alone']:.1f} X",
                f"{found[name, None, 'decode step: weights']:.0f} %",
                ", ".join(gained),
            )
        )
    return rows


def sparse_bursts() -> list[Row]:
    """Under the bursts of the trace."""
    return _bursts(NAMES)


def _bursts(names: Mapping[str, str]) -> list[Row]:
    """P99 TTFT over the draws of each load, and what a drop costs and gains besides."""
    found = kept()
    rows: list[Row] = [
        (
            *("", "burst", "memory, at most", *(f"`{system}` (s)" for system in SHOWN)),
            *("lower by", "as modelled", "P50 TPOT"),
        )
    ]
    for name, title in names.items():
        path = RESULTS / "simulated" / f"{name}.jsonl"
        for group in by_load(load(path)) if path.exists() else ():
            height, length_s, modelled = (
                found[name, group.load, what]
                for what in ("height", "length", "by drop, as modelled")
            )
            rows.append(
                (
                    title,
                    f"{height:.2f} X for {length_s:.0f} s",
                    _fullest(group),
                    *_row(group),
                    f"{modelled:.1f}x",
                    _cost(group),
                )
            )
    return rows


def _row(group: AtLoad) -> list[str]:
    seconds = {system: p99_s(group.by_system[system]) for system in SHOWN}
    gains = [seconds["recompute"][seed] / lower for seed, lower in seconds["drop"].items()]
    return [*(_ranged(seconds[system].values(), "") for system in SHOWN), _ranged(gains, "x")]


def _fullest(group: AtLoad) -> str:
    """KV memory in use where nothing is dropped: the mean over instances when it is most."""
    peaks = [run.peak_kv_usage for run in group.by_system["recompute"]]
    known = [peak for peak in peaks if peak is not None]
    return f"{100 * statistics.median(known):.0f} %"


def _cost(group: AtLoad) -> str:
    """P50 TPOT of `drop` over `recompute`, median of the draws."""
    pairs = _pairs(group.by_system["recompute"], group.by_system["drop"])
    ratio = statistics.median(after.tpot_p50_s / before.tpot_p50_s for before, after in pairs)
    return signed(100 * (ratio - 1))


def _pairs(
    one: Sequence[RunResult], other: Sequence[RunResult]
) -> Iterable[tuple[RunResult, RunResult]]:
    by_seed = {run.seed: run for run in other}
    return [(run, by_seed[run.seed]) for run in one]


def _ranged(values: Iterable[float], unit: str) -> str:
    """Median and range."""
    ordered = sorted(values)
    return f"{statistics.median(ordered):.1f}{unit} ({ordered[0]:.1f}-{ordered[-1]:.1f})"
