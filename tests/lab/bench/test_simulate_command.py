"""``kunserve simulate``: outputs, experiment files, and errors that help."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kunserve_lab.bench.runfile import read_run
from kunserve_lab.compare.experiment import Place
from kunserve_lab.compare.results import load
from kunserve_lab.compare.settings import SimulatedSetup, WorkloadSettings, workload_of
from kunserve_lab.compare.simulate_command import simulate_command
from kunserve_lab.compare.simulated import jobs
from kunserve_lab.compare.simulated.jobs import Job, WorkerDied, run_jobs
from kunserve_lab.compare.simulated.scenario import build_scenario
from kunserve_lab.compare.systems import find_system
from tests.chrome_trace import check_trace

SMALL = [
    *("--duration", "5", "--request-rate", "3", "--num-instances", "2", "--jobs", "1"),
    *("--lengths", "sharegpt", "--max-total-tokens", "2048"),
]
DROP = "drop-load1-seed0-round1"
ROOT = Path(__file__).parent.parent.parent.parent


def call(*args: str) -> Result:
    return CliRunner().invoke(simulate_command, args)


@pytest.mark.dear
def test_everything_is_written_and_equal_seeds_give_equal_files_however_many_run_at_once(
    tmp_path: Path,
) -> None:
    outputs = []
    for jobs_at_once in ("1", "2"):
        folder = tmp_path / jobs_at_once
        result = call(*SMALL, "--compare", "recompute,static-pp,drop", "-o", str(folder),
                      "--save-requests", "--chrome-trace", "--jobs", jobs_at_once)  # fmt: skip
        assert result.exit_code == 0, result.output
        assert "TTFT slowest (ms)" in result.output and "SLO violations 10x" in result.output
        assert "memory never fills at this rate" in result.output
        outputs.append(folder)
    one, two = outputs
    names = sorted(path.name for path in one.iterdir())
    assert {"results.jsonl", "table.txt", "report.html", "slo.png", "timeline.png"} <= set(names)
    for name in ("results.jsonl", "table.txt", f"{DROP}.jsonl", f"{DROP}.trace.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    lines = [json.loads(line) for line in (one / "results.jsonl").read_text().splitlines()]
    assert [line["system"] for line in lines] == ["recompute", "static-pp", "drop"]
    assert len(read_run(one / f"{DROP}.jsonl").records) == lines[2]["num_requests"]
    assert "data:image/png;base64," in (one / "report.html").read_text()
    for system in ("recompute", "static-pp", "drop"):
        events = check_trace(one / f"{system}-load1-seed0-round1.trace.json")
        assert sum(event["ph"] == "X" for event in events) > 100
        assert ("s" in {event["ph"] for event in events}) is (system == "static-pp")


def test_loads_are_run_side_by_side_and_kept_in_turn(tmp_path: Path) -> None:
    result = call(*SMALL, "--scale", "0.5,1", "--jobs", "2", "-o", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "P99 TTFT against recompute" in result.output
    assert (tmp_path / "loads.png").stat().st_size > 10_000
    assert [result.load for result in load(tmp_path)] == [0.5, 0.5, 1.0, 1.0]


def test_what_a_worker_finds_wrong_is_said() -> None:
    result = call(*SMALL, "--num-instances", "3", "--compare", "recompute,static-pp", "--jobs", "2")
    assert result.exit_code == 1 and "3 cannot be parted so" in result.output


def test_a_worker_that_dies_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = workload_of(WorkloadSettings(rate=1.0, duration_s=5.0), 1.0, seed=0)
    made = build_scenario(SimulatedSetup(num_instances=1), requests)
    dying = [Job(Place(1.0, 0, 0, "recompute"), find_system("recompute"), made)] * 2
    monkeypatch.setattr(jobs, "_work", _die)
    with pytest.raises(WorkerDied, match="try fewer at once: --jobs 1"):
        list(run_jobs(dying, 2))


def _die(*args: object) -> None:
    os._exit(1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "gpt-9"], "no model 'gpt-9' to simulate; there are: smollm2-135m"),
        (["--device", "tpu"], "no device 'tpu' to simulate; there are: a100"),
        (["--compare", "magic"], "no system 'magic' to compare; there are: recompute"),
        (["--model", "Qwen2.5-72B", "--gpus-per-instance", "1"], "Give it more GPUs"),
        (["--num-instances", "3", "--compare", "static-pp"], "3 cannot be parted so"),
        (["--scale", "much"], "--scale takes numbers"),
        (["--kill", "now"], "--kill takes SEC:INSTANCE"),
        (["--profile", "missing.json"], "cannot read the profile missing.json"),
        (["--trace", "missing.csv"], "missing.csv"),
        (["--scale", "0"], "a load must be above 0, not 0.0"),
        (["--scale", "nan"], "a load must be above 0, not nan"),
        (["--request-rate", "nan"], "finite request rate greater than 0"),
        (["--duration", "nan"], "duration must be positive and finite, not nan s"),
        (["--memory-utilization", "nan"], "memory_utilization must be in (0, 1], not nan"),
        (["--host-gib", "nan"], "host_gib must be at least 0 and finite, not nan"),
        (["--memory-utilization", "0.3484", "--block-size", "256"], "hold no block of 256 tokens"),
        (["--kill", "5:2"], "no instance 2 to kill: there are 0 to 1"),
        (["--kill", "-1:0"], "a time of at least 0 s, not at -1.0 s"),
        (["--kill", "nan:0"], "a time of at least 0 s, not at nan s"),
        (["--compare", ","], "name at least one system"),
    ],
)
def test_mistakes_are_named(args: list[str], message: str) -> None:
    result = call(*SMALL, *args)
    assert result.exit_code == 1
    assert message in result.output


def test_a_malformed_trace_line_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0.0,10,5\nsoon,10,5\n")
    result = call("--trace", str(trace))
    assert result.exit_code == 1
    assert "trace.csv" in result.output and "line 3" in result.output and "soon" in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--trace-start", "100"], "no request arrives between 100 s and inf s"),
        (["--trace-start", "5", "--trace-end", "2"], "a window must start at 0 or later"),
        (["--trace-end", "nan"], "a window must start at 0 or later"),
        (["--scale", "0.0001"], "no request is left"),
    ],
)
def test_a_trace_that_leaves_nothing(args: list[str], message: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,10,5\n1,10,5\n")
    result = call("--trace", str(trace), *args)
    assert result.exit_code == 1 and message in result.output


@pytest.mark.parametrize("rows", ["", "0,0,5\n"])
def test_an_empty_trace(rows: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(f"arrival_s,input_tokens,output_tokens\n{rows}")
    result = call("--trace", str(trace))
    assert result.exit_code == 1
    assert "trace.csv: no request with both lengths above 0" in result.output
