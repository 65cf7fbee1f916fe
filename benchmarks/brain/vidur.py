"""One trace through Vidur, a public simulator of vLLM, and through ours, with equal step times.

    python3 -m venv V && V/bin/pip install vidur msgspec
    python -m benchmarks.brain.vidur --vidur V > results.jsonl

Vidur (MLSys '24) has a queue, batches and preemption as vLLM has them. Its step times need profiles
that its package lacks, so both simulators ask ours how long a step takes: what differs is what they
schedule. The model is on simulated A800s with little KV memory, under a bursty window, and requests
are dealt in turn. This file is also what runs in Vidur's environment.
"""

import argparse
import csv
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kunserve.core.ids import RequestId
from kunserve.core.step import Chunk
from kunserve_lab.compare.settings import SimulatedSetup, WorkloadSettings, workload_of
from kunserve_lab.compare.simulated.scenario import Scenario, build_scenario
from kunserve_lab.sim.profile import StepTimes

SYSTEM = "recompute-rr"
MOST_TOKENS = 16_384
MEMORY = 0.42
"""Of the GPU: so little that bursts fill what weights leave."""
DAY = "1"
WORKLOAD = WorkloadSettings(duration_s=200.0, max_total_tokens=MOST_TOKENS)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulator says."""

    ttft_s: tuple[float, ...]
    """Of each request."""
    latency_s: tuple[float, ...]
    num_preemptions: int

    def percentile(self, share: float) -> float:
        """Of TTFT, in seconds."""
        return sorted(self.ttft_s)[min(len(self.ttft_s) - 1, int(share * len(self.ttft_s)))]


def scenario_of(num_instances: int, rate: float, seed: int) -> Scenario:
    """The same in both environments."""
    setup = SimulatedSetup(num_instances=num_instances, memory_utilization=MEMORY)
    return build_scenario(setup, workload_of(replace(WORKLOAD, rate=rate), 1.0, seed))


def by_ours(scenario: Scenario) -> Outcome:
    """With our brain."""
    from kunserve_lab.compare.simulated.simulation import simulate
    from kunserve_lab.compare.systems import SYSTEMS

    alike = replace(scenario.scheduler, enable_prefix_caching=False)  # Vidur has none
    done = simulate(SYSTEMS[SYSTEM], replace(scenario, scheduler=alike))
    records = done.run.records
    assert all(one.succeeded for one in records), "some failed"
    return Outcome(
        tuple(one.token_times_s[0] - one.planned_s for one in records),
        tuple(one.finish_s - one.planned_s for one in records),
        done.num_preemptions,
    )


def by_vidur(environment: Path, num_instances: int, rate: float, seed: int) -> Outcome:
    """With its schedulers, in its own environment."""
    root = Path(__file__).parents[2]
    command = [str(environment / "bin" / "python"), "-m", "benchmarks.brain.vidur"]
    command += ["--inside", json.dumps([num_instances, rate, seed])]
    kept = os.environ | {"PYTHONPATH": str(root), "WANDB_MODE": "disabled"}
    with tempfile.TemporaryDirectory(prefix="vidur-") as folder:
        done = subprocess.run(
            command, cwd=folder, env=kept, stdout=subprocess.PIPE, text=True, check=True
        )
    told = json.loads(done.stdout.splitlines()[-1])
    return Outcome(tuple(told["ttft_s"]), tuple(told["latency_s"]), told["preemptions"])


# What runs in Vidur's environment


def inside(num_instances: int, rate: float, seed: int) -> dict[str, Any]:
    """Replay the trace there."""
    scenario = scenario_of(num_instances, rate, seed)
    trace = Path("trace.csv")
    with trace.open("w") as lines:
        writer = csv.writer(lines)
        writer.writerow(["Date", "Time", "PromptTokenCount", "CompletionTokenCount"])
        for one in scenario.workload.requests():
            writer.writerow([DAY, one.arrival_s, one.input_tokens, one.output_tokens])
    use_our_times(scenario.profile.times, scenario.profile.spec.num_layers)
    mend_restarts()
    simulator = importlib.import_module("vidur.simulator").Simulator(configured(scenario, trace))
    requests = [event._request for _, event in simulator._event_queue]
    simulator.run()
    return {
        "ttft_s": [one.prefill_completed_at - one.arrived_at for one in requests],
        "latency_s": [one.completed_at - one.arrived_at for one in requests],
        "preemptions": sum(one.num_restarts for one in requests),
    }


def use_our_times(times: StepTimes, num_layers: int) -> None:
    """In the place of a predictor that is trained on profiles."""
    predictors = importlib.import_module("vidur.execution_time_predictor")
    native = importlib.import_module("vidur._native.entities")
    kinds = importlib.import_module("vidur.types").ExecutionTimePredictorType
    base = predictors.BaseExecutionTimePredictor

    def get_execution_time(self: Any, batch: Any, pipeline_stage: int) -> Any:
        chunks = [
            Chunk(RequestId(""), kv - new, new, kv >= request.num_prefill_tokens)
            for request, new, kv in zip(
                batch.requests, batch.num_q_tokens, batch.num_kv_tokens, strict=True
            )
        ]
        step_ms = 1e3 * times.stage_s(chunks, num_layers, True)
        return native.ExecutionTime(1, step_ms, *[0.0] * 13)

    ours = type("Ours", (base,), {"get_execution_time": get_execution_time})
    ours.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    registry = predictors.ExecutionTimePredictorRegistry
    registry._registry[kinds.RANDOM_FORREST] = ours


def mend_restarts() -> None:
    """Vidur 0.0.26 forgets two fields of a preempted request, and stops at an assertion."""
    request = importlib.import_module("vidur.entities").Request
    restart = request.restart

    def mended(self: Any) -> None:
        restart(self)
        self._num_stage_processed_tokens = 0
        self._is_prefill_stage_complete = False

    request.restart = mended


def configured(scenario: Scenario, trace: Path) -> Any:
    """Blocks, batches and chunks as ours; its model counts only where memory is not told."""
    config = importlib.import_module("vidur.config")
    spec = scenario.profile.spec
    return config.SimulationConfig(
        log_level="warning",
        cluster_config=config.ClusterConfig(
            num_replicas=scenario.num_instances,
            replica_config=config.ReplicaConfig(num_pipeline_stages=1, tensor_parallel_size=1),
            cache_config=config.CacheConfig(
                block_size=spec.block_size, num_blocks=spec.kv_units // spec.num_layers
            ),
            global_scheduler_config=config.RoundRobinGlobalSchedulerConfig(),
            replica_scheduler_config=config.SarathiSchedulerConfig(
                batch_size_cap=scenario.scheduler.max_num_seqs,
                chunk_size=scenario.scheduler.max_num_batched_tokens,
            ),
        ),
        request_generator_config=config.TraceRequestGeneratorConfig(
            trace_file=str(trace),
            date=int(DAY),
            max_tokens=MOST_TOKENS,
            prefill_scale_factor=1.0,
            decode_scale_factor=1.0,
            time_scale_factor=1.0,
        ),
        metrics_config=config.MetricsConfig(write_metrics=False, enable_chrome_trace=False),
    )


def main(words: Sequence[str] | None = None) -> None:
    """A row for each number of instances."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vidur", type=Path, help="its environment")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second an instance")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.inside:
        print(json.dumps(inside(*json.loads(options.inside))))
        return
    if options.vidur is None:
        parser.error("name the environment of Vidur")
    from benchmarks.paper.simulated_code import code
    from benchmarks.report import Report

    with Report("vidur", code(), system=SYSTEM, rate=options.rate) as report:
        for num_instances in (1, 4):
            for seed in range(options.seeds):
                rate = options.rate * num_instances
                ours = by_ours(scenario_of(num_instances, rate, seed))
                theirs = by_vidur(options.vidur.absolute(), num_instances, rate, seed)
                for name, one in (("ours", ours), ("Vidur", theirs)):
                    where = {"instances": num_instances, "seed": seed, "by": name}
                    report.add("requests", len(one.ttft_s), "", **where)
                    report.add("TTFT P50", one.percentile(0.5), "s", **where)
                    report.add("P99", one.percentile(0.99), "s", **where)
                    report.add(
                        "latency mean", sum(one.latency_s) / len(one.latency_s), "s", **where
                    )
                    report.add("preemptions", one.num_preemptions, "", **where)


if __name__ == "__main__":
    main(sys.argv[1:])
