"""The burst of a day on a GPU: its load, its simulation, and what a second call still runs."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu_kit.parts import PartsFailed
from benchmarks.gpu_phases import spike
from benchmarks.gpu_phases.machine import SHAPES, Machine
from benchmarks.report import Report
from kunserve.core.cost import CostCoefficients
from kunserve_lab.bench.metrics import compute_metrics
from kunserve_lab.bench.runfile import Run
from kunserve_lab.compare.experiment import World
from kunserve_lab.compare.real import RealJob
from kunserve_lab.compare.results import Outcome, result_of
from kunserve_lab.compare.settings import RealSetup

COST = CostCoefficients(1e-9, 2e-5, 4e-3, 3e-3)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """One that nothing was measured on, with step times by hand."""
    monkeypatch.setattr(spike, "stock_device", lambda machine: None)
    monkeypatch.setattr(Machine, "is_alive", lambda machine: True)
    monkeypatch.setattr(spike, "RooflineTimes", lambda *args: None)
    monkeypatch.setattr(spike, "profile_times", lambda *args: COST)
    return Machine(False, "no library", tmp_path)


def served(asked: list[RealJob]) -> Callable[..., Iterator[Outcome]]:
    """In place of real servers: every job is done at once."""

    def run_jobs(
        jobs: list[RealJob], setup: RealSetup, say: Callable[[str], None]
    ) -> Iterator[Outcome]:
        for job in jobs:
            asked.append(job)
            run = Run(job.place.system, "", 1.0, (), (), (), ())
            metrics = compute_metrics(run.records, 1.0)
            counts = {"num_preemptions": 0, "num_drops": 0, "num_restores": 0}
            yield Outcome(result_of(World.REAL, job.place, job.digest, run, metrics, **counts), run)

    return run_jobs


def figures_of(text: str) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in text.splitlines() if '"settings"' in line]
    return [
        (line["settings"].get("world", ""), line["settings"].get("system", "")) for line in lines
    ]


def test_both_systems_meet_the_burst_and_what_is_done_is_kept(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[RealJob] = []
    monkeypatch.setattr(spike, "run_jobs", served(asked))
    spike.run(machine, Report("test"))
    assert [job.place.system for job in asked] == ["recompute", "drop"]
    first, second = asked
    assert first.workload == second.workload and len(first.workload) > 10
    found = figures_of(capsys.readouterr().out)
    pairs = {(world, system) for world in ("real", "simulated") for system in spike.SYSTEMS}
    assert pairs <= set(found)
    setup = (machine.folder / "tiny-words" / "tokenizer.json").read_text()
    assert json.loads(setup)["model"]["vocab"]["w7"] == 7
    asked.clear()
    spike.run(machine, Report("test"))
    assert not asked, "both runs are known"
    assert set(figures_of(capsys.readouterr().out)) == set(found)


def test_the_load_is_the_least_that_overflows_the_memory(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spike, "_LOADS", (0.1, 0.5, 1.0, 2.0))
    real = Machine(True, "no library", machine.folder)
    seen: list[float] = []

    def simulated(scenario: object, name: str, load: float) -> object:
        seen.append(load)
        return type("Result", (), {"peak_kv_usage": 0.99 if load >= 1.0 else 0.5})

    monkeypatch.setattr(spike, "_simulated", simulated)
    spec = SHAPES["1.5b"]
    instance = spike._instance(real, spec, spec.weights_bytes + (1 << 30))
    load, answers = spike._overflowing(real, instance)
    assert load == 1.0 and len(answers) == 2 and max(seen) == 1.0


def test_the_exchange_is_as_fast_as_it_was_seen(machine: Machine) -> None:
    figures = [{"name": "exchange", "value": value} for value in (1.0, 3.0, None, 2.0)]
    (machine.folder / "P6.json").write_text(json.dumps({"figures": figures}))
    spec = SHAPES["tiny-words"]
    instance = spike._instance(machine, spec, spec.weights_bytes + (1 << 20))
    assert instance.network_bytes_per_s == 2e9


def test_runs_that_would_not_end_in_time_are_for_the_next_call(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[RealJob] = []
    monkeypatch.setattr(spike, "run_jobs", served(asked))
    with pytest.raises(PartsFailed, match="call again"):
        spike.run(replace(machine, limit_s=50.0), Report("test"))
    assert not asked
