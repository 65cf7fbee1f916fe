"""Results of comparisons, made by hand."""

from math import isnan
from typing import Any

from kunserve_lab.bench.metrics import compute_metrics
from kunserve_lab.bench.records import RequestRecord, ServerSample
from kunserve_lab.bench.runfile import Run
from kunserve_lab.compare.experiment import Place, World
from kunserve_lab.compare.results import RunResult, result_of


def record(number: int, ttft_s: float, tpot_s: float = 0.02, error: str | None = None) -> Any:
    """A request of eleven tokens that is sent at its number in seconds."""
    times = tuple(number + ttft_s + tpot_s * token for token in range(11))
    return RequestRecord(
        number=number,
        server="none",
        planned_s=float(number),
        sent_s=float(number),
        token_times_s=times,
        last_token_s=times[-1],
        finish_s=times[-1],
        input_tokens=5,
        asked_output_tokens=11,
        output_tokens=11,
        finish_reason="length",
        error=error,
    )


def run_of(system: str, ttft_s: list[float], kv_usage: float = 0.5, tpot_s: float = 0.02) -> Run:
    """A run with these times to first token; a request with NaN failed."""
    records = tuple(
        record(number, 1.0, tpot_s, "refused") if isnan(one) else record(number, one, tpot_s)
        for number, one in enumerate(ttft_s)
    )
    samples = (ServerSample(0.0, kv_usage=0.1), ServerSample(1.0, kv_usage=kv_usage))
    return Run(system, "told", max(r.finish_s for r in records), records, samples)


def result(
    system: str,
    ttft_s: list[float],
    *,
    load: float = 1.0,
    seed: int = 0,
    number: int = 0,
    world: World = World.SIMULATED,
    kv_usage: float = 0.5,
    tpot_s: float = 0.02,
    **more: Any,
) -> RunResult:
    """One line of results."""
    run = run_of(system, ttft_s, kv_usage, tpot_s)
    counts = {"num_preemptions": 0, "num_drops": 0, "num_restores": 0}
    return result_of(
        world,
        Place(load, seed, number, system),
        "d",
        run,
        compute_metrics(run.records, run.duration_s),
        **(counts | more),
    )
