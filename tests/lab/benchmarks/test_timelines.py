"""Timelines that are kept: thinned, all of one length, and of every workload of the claims."""

from pathlib import Path

import pytest

from benchmarks.paper.kept_results import FIXED
from benchmarks.paper.timelines import PARTS, SYSTEMS, draw, kept, kept_path, series
from kunserve_lab.bench.records import ServerSample
from kunserve_lab.bench.runfile import Run
from tests.lab.bench.comparisons import record

SERIES = ("wanted", "used", "capacity", "ttft_s", "tokens_per_s")


def test_a_run_is_thinned_into_parts_of_equal_length() -> None:
    records = tuple(record(number, 0.5) for number in range(300))
    samples = tuple(
        ServerSample(
            at / 2, kv_demand_blocks=float(at), kv_used_blocks=5.0, kv_capacity_blocks=10.0
        )
        for at in range(700)
    )
    run = Run("drop", "told", 300.7, records, samples)
    found = series(run, 10)
    assert found["part_s"] == 5.0
    assert {len(found[name]) for name in SERIES} == {61}
    assert set(found["used"]) == {0.5} and set(found["capacity"]) == {1.0}
    assert found["wanted"][1] == pytest.approx((10 + 19) / 2 / 10, abs=1e-3)
    assert set(found["ttft_s"][:60]) == {0.5} and found["ttft_s"][60] is None
    assert found["tokens_per_s"][10] == 11.0


def test_every_workload_of_the_claims_has_its_timelines(tmp_path: Path) -> None:
    lines = kept()
    assert {(line["workload"], line["system"]) for line in lines} == {
        (name, system) for name in FIXED for system in SYSTEMS
    }
    for line in lines:
        assert {len(line[name]) for name in SERIES} <= set(range(1, PARTS + 1))
        assert line["experiment"] == FIXED[line["workload"]]
    assert kept_path().stat().st_size < 200_000
    draw(lines).savefig(tmp_path / "some.png")
    assert (tmp_path / "some.png").stat().st_size > 10_000
