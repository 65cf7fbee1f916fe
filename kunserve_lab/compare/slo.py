"""Service-level objectives of a comparison, as ``docs/metrics.md`` defines them."""

import statistics
from dataclasses import dataclass

import numpy as np

from kunserve_lab.compare.groups import AtLoad, BySystem
from kunserve_lab.compare.results import RunResult
from kunserve_lab.compare.systems import is_baseline

FACTOR = 5.0
"""Times the base that a latency may take; the paper calls 5 tight and 10 loose."""
FACTORS = tuple(float(factor) for factor in range(1, 11))


BOUND = "endless"
"""The system whose latencies are the base where it ran: nobody waits for memory there."""


@dataclass(frozen=True, slots=True)
class SloBase:
    """The latencies that objectives are multiples of: a P50 of some system, at some load."""

    ttft_s: float
    tpot_s: float
    ttft_of: str
    """The system whose P50 TTFT it is."""
    tpot_of: str
    load: float


def one_base(group: AtLoad) -> SloBase:
    """The same for all loads and systems: the P50 of ``endless`` at the lowest load.

    Without that system, the best of all there. A base that grows with the load would call ever
    later answers good.
    """
    runs = group.lowest.get(BOUND)
    return _least(group.lowest if runs is None else {BOUND: runs})


def paper_base(group: AtLoad) -> SloBase:
    """The best baseline's P50 at the group's own load, as in the paper; else the best of all."""
    baselines = {n: runs for n, runs in group.by_system.items() if is_baseline(n)}
    return _least(baselines or group.by_system)


def violations(result: RunResult, base: SloBase, factor: float) -> tuple[float, float] | None:
    """Shares of the requests that miss either objective, and that miss the one for TTFT.

    None for a run of an older file, which did not keep its requests.
    """
    if not result.ttft_ms:
        return None
    ttft_ms = np.array(result.ttft_ms, dtype=np.float64)
    tpot_ms = np.array(result.tpot_ms, dtype=np.float64)
    late = ~(ttft_ms <= factor * base.ttft_s * 1e3)  # a failed request is NaN: it misses both
    slow = late & np.isnan(ttft_ms) | (np.nan_to_num(tpot_ms) > factor * base.tpot_s * 1e3)
    return float((late | slow).mean()), float(late.mean())


def goodput(result: RunResult, base: SloBase, factor: float) -> float | None:
    """Requests that met both objectives, per second of the run; None as for ``violations``."""
    late = violations(result, base, factor)
    if late is None:
        return None
    return (1.0 - late[0]) * result.num_requests / max(result.duration_s, 1e-9)


def _least(among: BySystem) -> SloBase:
    systems = {n: runs for n, runs in among.items() if any(r.num_completed for r in runs)} or among
    ttft = {name: _median_p50_s(runs, "ttft") for name, runs in systems.items()}
    tpot = {name: _median_p50_s(runs, "tpot") for name, runs in systems.items()}
    ttft_of, tpot_of = min(ttft, key=ttft.__getitem__), min(tpot, key=tpot.__getitem__)
    (at, *_) = (run.load for runs in systems.values() for run in runs)
    return SloBase(ttft[ttft_of], tpot[tpot_of], ttft_of, tpot_of, at)


def _median_p50_s(runs: tuple[RunResult, ...], latency: str) -> float:
    """The median over runs of the P50, from the latencies that were kept if they were."""
    values = []
    for run in runs:
        kept = [v for v in getattr(run, f"{latency}_ms") if v is not None]
        values.append(statistics.median(kept) / 1e3 if kept else run.percentile_s(latency, 50.0))
    return statistics.median(values)
