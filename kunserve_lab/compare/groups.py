"""Results beside each other: by load, and on equal requests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kunserve_lab.bench.metrics import PERCENTILES
from kunserve_lab.compare.results import RunResult, percentile_field

BySystem = dict[str, tuple[RunResult, ...]]


@dataclass(frozen=True, slots=True)
class AtLoad:
    """The runs of one load, by system."""

    load: float
    by_system: BySystem
    lowest: BySystem
    """Those of the lowest load of all, of which the objectives for every load are multiples."""

    @property
    def runs(self) -> tuple[RunResult, ...]:
        """All of them."""
        return tuple(run for runs in self.by_system.values() for run in runs)

    @property
    def num_each(self) -> int:
        """Runs of the system that has most."""
        return max(len(runs) for runs in self.by_system.values())


def by_load(results: Sequence[RunResult]) -> list[AtLoad]:
    """One group per load, in the order in which loads and systems first appear.

    Their percentiles are over equal requests.
    """
    groups: dict[float, dict[str, list[RunResult]]] = {}
    for result in on_equal_requests(results):
        groups.setdefault(result.load, {}).setdefault(result.system, []).append(result)
    of = {at: {n: tuple(runs) for n, runs in found.items()} for at, found in groups.items()}
    return [AtLoad(at, by_system, of[min(of)]) for at, by_system in of.items()]


def on_equal_requests(results: Sequence[RunResult]) -> list[RunResult]:
    """The same, with percentiles over the requests that all runs of a load and a seed completed.

    A prompt that only one system can hold is the slowest of that system, and would make it look
    slower than those that refused it. A run that completed nothing says nothing of requests, nor
    does one of an older file, which did not keep its requests. One that sheds refuses others in
    every run: its percentiles are over what it served, and nobody else's are.
    """
    common: dict[tuple[float, int], np.ndarray] = {}
    for run in filter(_tells, results):
        key, done = (run.load, run.seed), _completed(run)
        common[key] = common[key] & done if key in common else done
    return [_only(run, common[run.load, run.seed]) if _tells(run) else run for run in results]


def _tells(run: RunResult) -> bool:
    return not run.num_shed and any(value is not None for value in run.ttft_ms)


def _completed(run: RunResult) -> np.ndarray:
    return np.array([value is not None for value in run.ttft_ms])


def _only(run: RunResult, wanted: np.ndarray) -> RunResult:
    """The run's percentiles over these of its requests; its own where it has no others."""
    left_out = tuple(np.flatnonzero(_completed(run) & ~wanted).tolist())
    if not left_out:
        return run
    percentiles: dict[str, Any] = {}
    for name in ("ttft", "tpot"):
        kept = np.array(getattr(run, f"{name}_ms"), dtype=np.float64)[wanted]
        kept = kept[~np.isnan(kept)]
        values = np.percentile(kept, PERCENTILES) / 1e3 if len(kept) else np.zeros(len(PERCENTILES))
        for percentile, value in zip(PERCENTILES, values, strict=True):
            percentiles[percentile_field(name, percentile)] = round(float(value), 5)
    return replace(run, left_out=left_out, **percentiles)
