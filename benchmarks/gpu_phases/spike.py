"""P7: a burst of Azure's trace against real servers: recompute and drop, and the simulator's word.

Runs alternate, each with a server of its own. A run that is done is kept, so a call that ends in
the middle goes on there.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmarks.gpu_kit.parts import Part
from benchmarks.gpu_phases.costs import (
    PROFILE,
    batch_tokens_of,
    block_size_of,
    measured,
    stock_device,
)
from benchmarks.gpu_phases.machine import MIB, Machine, median
from benchmarks.gpu_phases.models import serving_model, write_model
from benchmarks.report import Report, Setting
from kunserve.core.config import SchedulerConfig
from kunserve.core.cost import CostCoefficients
from kunserve.model.spec import ModelSpec
from kunserve_lab.compare import results
from kunserve_lab.compare.experiment import Experiment, Place, World, plan
from kunserve_lab.compare.real import RealJob, run_jobs
from kunserve_lab.compare.results import RunResult, result_of
from kunserve_lab.compare.settings import (
    RealSetup,
    WorkloadSettings,
    digest_of,
    workload_of,
)
from kunserve_lab.compare.simulated.scenario import Scenario
from kunserve_lab.compare.simulated.simulation import simulate
from kunserve_lab.compare.systems import find_system
from kunserve_lab.profile.cost_forms import as_vector, from_vector
from kunserve_lab.sim.costs import cpu_profile, profile_times
from kunserve_lab.sim.models import from_spec
from kunserve_lab.sim.profile import InstanceProfile, RooflineTimes
from kunserve_lab.workload.workload import Workload

SYSTEMS = ("recompute", "drop")
RUNS = "P7.runs.jsonl"
"""In the folder of phases: a line for each run that is done."""
_TRACE = "azure-2023-merged-640s"
_KV_SHARE = 0.15
"""KV memory of an instance over its weights: a burst shall fill it before it fills the time."""
_LOADS = (0.2, 0.35, 0.5, 0.7, 1.0, 1.5)
_ROUNDS = 2
_START_S = 90.0
"""To start and stop a server, where none was measured yet."""
_REQUEST_S = 400.0
"""A request that takes longer has failed."""


def run(machine: Machine, report: Report) -> None:
    """Find a load that overflows the memory in the simulator, and play it to real servers."""
    began_s = time.monotonic()
    spec, kv_bytes = serving_model(machine)
    kv_bytes = min(kv_bytes, int(spec.weights_bytes * _KV_SHARE)) if machine.is_real else kv_bytes
    memory_bytes = spec.weights_bytes + kv_bytes
    instance = _instance(machine, spec, memory_bytes)
    load, simulated = _overflowing(machine, instance)
    workload = _workload(machine, load)
    rounds = _ROUNDS if machine.is_real else 1
    setup = _setup(machine, spec, memory_bytes)
    jobs = _jobs(Experiment(setup=setup, systems=SYSTEMS, loads=(load,), rounds=rounds), workload)
    burst = _Burst(machine, report, setup, began_s, workload.duration_s)

    def simulate_it() -> None:
        report.add("requests", len(workload), "", model=spec.name, load=load)
        report.add("KV memory of each", kv_bytes / MIB, "MiB", model=spec.name, load=load)
        for result in simulated:
            _tell(report, result, "simulated")
        _verdict(report, "simulated", simulated)

    machine.do(
        Part("simulated", simulate_it),
        *(
            Part(f"round {number + 1}", partial(burst.play, jobs, number))
            for number in range(rounds)
        ),
    )


@dataclass(slots=True)
class _Burst:
    """Real servers under it, one after the other."""

    machine: Machine
    report: Report
    setup: RealSetup
    began_s: float
    run_s: float
    """How long a run takes, beside the server's start and stop."""
    found: list[RunResult] = field(default_factory=list)

    def play(self, jobs: Sequence[RealJob], number: int) -> None:
        """A run of each system, and the verdict of what there is: one that fails stops no other."""
        known = _known(self.machine.folder / RUNS)
        done = [known.get((job.place, job.digest)) for job in jobs if job.place.round < number]
        self.found = [result for result in done if result is not None]
        bad: list[str] = []
        for job in (job for job in jobs if job.place.round == number):
            try:
                result = self._result(job)
            except Exception as error:
                bad.append(f"{job.place.system}: {error}")
                continue
            _tell(self.report, result, "real")
            self.found.append(result)
            if result.num_failed:
                bad.append(f"{job.place.system}: {result.num_failed} requests failed")
        _verdict(self.report, "real", self.found)
        assert not bad, "; ".join(bad)

    def _result(self, job: RealJob) -> RunResult:
        """Of an earlier call, or of a server of its own now."""
        path = self.machine.folder / RUNS
        known = _known(path).get((job.place, job.digest))
        if known is None:
            self.run_s = max([self.run_s, *(one.duration_s for one in self.found)])
            if time.monotonic() - self.began_s + self.run_s + _START_S > self.machine.limit_s:
                raise TimeoutError("no time for a further run: call again, what is done is kept")
            (outcome,) = run_jobs([job], self.setup, lambda text: None)
            known = outcome.result
            results.append(path, known)
        return known


def _jobs(experiment: Experiment, workload: Workload) -> list[RealJob]:
    return [
        RealJob(
            place,
            find_system(place.system),
            workload,
            digest_of(experiment.setup, find_system(place.system), workload),
        )
        for place in plan(experiment)
    ]


def _known(path: Path) -> dict[tuple[Place, str], RunResult]:
    """Runs of an earlier call."""
    if not path.exists():
        return {}
    return {(result.place, result.digest): result for result in results.load(path)}


def _workload(machine: Machine, load: float) -> Workload:
    """70 s with the burst; in a rehearsal a few small requests of it."""
    if machine.is_real:
        settings = WorkloadSettings(trace=Path(_TRACE), start_s=390.0, end_s=460.0)
    else:
        settings = WorkloadSettings(
            trace=Path(_TRACE), start_s=415.0, end_s=419.0, length_scale=0.02
        )
    return workload_of(settings, load, seed=0)


def _setup(machine: Machine, spec: ModelSpec, memory_bytes: int) -> RealSetup:
    """Servers of two instances. A rehearsal's compute on the CPU: `serve` knows no stand-in."""
    folder = write_model(spec, machine.folder / spec.name)
    is_measured = machine.is_real and measured(machine) is not None
    return RealSetup(
        model=str(folder),
        instance_memory=str(memory_bytes),
        max_num_batched_tokens=batch_tokens_of(machine),
        profile=machine.folder / PROFILE if is_measured else None,
        serve_flags=(
            *("--device", "cuda" if machine.is_real else "cpu"),
            *("--load-format", "dummy"),
            *("--block-size", str(block_size_of(machine))),
        ),
        timeout_s=_REQUEST_S,
    )


def _instance(machine: Machine, spec: ModelSpec, memory_bytes: int) -> InstanceProfile:
    """One of the two instances as the simulator has it: as P8 measured it, if it did."""
    model, profile = from_spec(spec), measured(machine)
    if profile is not None:
        serving, alone = profile.serving, profile.alone
    else:
        times = RooflineTimes(model, stock_device(machine), 1, 1.0)
        alone = profile_times(times, spec.num_layers, batch_tokens_of(machine))
        serving = _twice(alone)  # two instances share the device
    instance = cpu_profile(model, serving, alone, block_size_of(machine), memory_bytes)
    exchange = _exchange_bytes_per_s(machine)
    return instance if exchange is None else replace(instance, network_bytes_per_s=exchange)


def _twice(cost: CostCoefficients) -> CostCoefficients:
    return from_vector(2.0 * as_vector(cost), cost.experts)


def _exchange_bytes_per_s(machine: Machine) -> float | None:
    """What P6 saw."""
    path = machine.folder / "P6.json"
    if not path.exists():
        return None
    figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
    speeds = [
        f["value"]
        for f in figures
        if f["name"] == "exchange" and f["value"] and f.get("settings", {}).get("bytes") != "sent"
    ]
    return median(speeds) * 1e9 if speeds else None


def _overflowing(machine: Machine, instance: InstanceProfile) -> tuple[float, list[RunResult]]:
    """The smallest load that fills the memory of instances that recompute; all answers to it.

    Where none does it is the largest one.
    """
    loads = _LOADS if machine.is_real else _LOADS[2:3]
    for load in loads:
        workload = _workload(machine, load)
        scenario = Scenario(
            profile=instance,
            num_instances=2,
            workload=workload,
            scheduler=SchedulerConfig(max_num_batched_tokens=batch_tokens_of(machine)),
            cost=profile_times(instance.times, instance.spec.num_layers, batch_tokens_of(machine)),
        )
        answers = [_simulated(scenario, name, load) for name in SYSTEMS]
        if (answers[0].peak_kv_usage or 0.0) >= results.FULL or load == loads[-1]:
            return load, answers
    raise AssertionError(loads)


def _simulated(scenario: Scenario, name: str, load: float) -> RunResult:
    done = simulate(find_system(name), scenario)
    return result_of(
        World.SIMULATED,
        Place(load, 0, 0, name),
        "",
        done.run,
        done.metrics,
        num_preemptions=done.num_preemptions,
        num_drops=done.num_drops,
        num_restores=done.num_restores,
    )


def _tell(report: Report, result: RunResult, world: str) -> None:
    where: dict[str, Setting] = {
        "world": world,
        "system": result.system,
        "round": result.round,
    }
    for name in ("ttft", "tpot"):
        for percentile in (50.0, 99.0):
            value = result.percentile_s(name, percentile) * 1e3
            report.add(f"{name.upper()} P{percentile:g}", value, "ms", **where)
    report.add("output", result.output_throughput, "tokens/s", **where)
    for name in ("num_failed", "num_preemptions", "num_drops", "num_restores"):
        report.add(name.removeprefix("num_"), getattr(result, name), "", **where)
    if result.peak_kv_usage is not None:
        report.add("peak use of KV memory", result.peak_kv_usage * 100, "%", **where)


def _verdict(report: Report, world: str, found: Sequence[RunResult]) -> None:
    """How much shorter the longest waits are when dropping."""
    waits = {
        name: [r.percentile_s("ttft", 99.0) for r in found if r.system == name] for name in SYSTEMS
    }
    if all(waits.values()):
        recompute, drop = (median(waits[name]) for name in SYSTEMS)
        ratio = recompute / drop if drop > 0 else None
        report.add("TTFT P99, recompute / drop", ratio, "", world=world)
