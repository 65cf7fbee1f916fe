"""Lines of results: written, read back, and read from files of older versions."""

from pathlib import Path

import pytest

from kunserve.core.errors import ConfigError
from kunserve_lab.compare.experiment import Place, World
from kunserve_lab.compare.groups import by_load
from kunserve_lab.compare.output.table import table
from kunserve_lab.compare.results import append, load, mend, save
from tests.lab.bench.comparisons import result

ROOT = Path(__file__).parent.parent.parent.parent
OLDER = (
    '{"system":"recompute","scale":0.4,"provenance":"azure","num_requests":705,"num_failed":0,'
    '"duration_s":229.453,"request_throughput":3.07,"output_throughput":1549.97,'
    '"mean_kv_usage":0.5975,"num_preemptions":1,"lost_tokens":12481,"num_drops":0,'
    '"num_restores":0,"bubble_ratio":null,"gpu_hours":0.521,"ttft_p50_s":2.13,"ttft_p90_s":11.8,'
    '"ttft_p99_s":24.1,"ttft_p99.9_s":28.7,"tpot_p50_s":0.09,"tpot_p90_s":0.11,'
    '"tpot_p99_s":0.14,"tpot_p99.9_s":0.17}\n'
)


def test_a_line_is_read_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    one = result("drop", [0.1, 0.2], load=0.5, seed=3, environment={"commit": "abc"})
    two = result("drop", [0.1], number=1, world=World.REAL, load_average=(0.5, 1.25))
    append(path, one)
    append(path, two)
    assert load(path) == load(tmp_path) == [one, two]
    assert (one.place, one.num_completed) == (Place(0.5, 3, 0, "drop"), 2)
    assert one.ttft_ms == (100, 200) and one.slowest_s("ttft") == pytest.approx(0.2)
    assert one.percentile_s("tpot", 99.9) == pytest.approx(0.02)


def test_the_later_line_of_a_place_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    save(path, [result("drop", [0.1]), result("swap", [0.3]), result("drop", [0.2])])
    assert [(r.system, r.ttft_p50_s) for r in load(path)] == [("swap", 0.3), ("drop", 0.2)]


def test_lines_of_older_versions(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(OLDER)
    (older,) = load(path)
    assert (older.world, older.load, older.seed, older.round) == (World.SIMULATED, 0.4, 0, 0)
    assert older.percentile_s("ttft", 99.9) == 28.7 and older.ttft_ms == ()
    assert older.digest == ""
    text = table([older])
    assert "TTFT P99 (ms)" in text and "SLO" not in text


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "benchmarks" / "results" / "simulated").glob("*.jsonl")),
    ids=lambda path: path.stem,
)
def test_results_of_the_tree_can_be_read(path: Path) -> None:
    groups = by_load(load(path))
    assert groups and table([run for group in groups for run in group.runs])


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(OLDER + '{"system": 3}\n')
    with pytest.raises(ConfigError, match=r"results.jsonl, line 2: "):
        load(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "absent.jsonl")


@pytest.mark.parametrize(
    ("rest", "is_torn"), [(b"", False), (b'{"sys', True), (OLDER[:-1].encode(), False)]
)
def test_a_torn_last_line_is_taken_away(rest: bytes, is_torn: bool, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert not mend(path)
    append(path, result("drop", [0.1]))
    path.write_bytes(path.read_bytes() + rest)
    assert mend(path) is is_torn
    append(path, result("swap", [0.1]))
    names = ["recompute"] if rest and not is_torn else []
    assert [one.system for one in load(path)] == ["drop", *names, "swap"]
