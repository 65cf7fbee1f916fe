"""Where traffic lies on the map, in words and as a table and a picture."""

import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from benchmarks.paper.map_agreement import compared
from kunserve_lab.compare.output import map_output
from kunserve_lab.compare.settings import SimulatedSetup
from kunserve_lab.compare.simulate_command import simulate_command
from kunserve_lab.compare.simulated.burst_map import BurstMap, make_map, map_rows
from kunserve_lab.compare.simulated.projection import (
    AGREED,
    SIMULATED,
    Kind,
    Projection,
    capacity,
    outlook,
    outlook_lines,
)
from kunserve_lab.compare.simulated.scenario import Scenario, build_scenario
from kunserve_lab.compare.simulated.simulation import simulate
from kunserve_lab.compare.systems import find_system
from kunserve_lab.sim.fluid import Capacity
from kunserve_lab.workload.bursty import Spike, bursty_arrivals
from kunserve_lab.workload.lengths import random_lengths
from kunserve_lab.workload.workload import Workload

ROOT = Path(__file__).parent.parent.parent.parent


def scenario(
    height: float,
    length_s: float,
    *,
    lengths: tuple[int, int] = (4000, 400),
    num_instances: int = 2,
    max_num_seqs: int = 256,
    memory_utilization: float = 0.53,
) -> Scenario:
    """Even arrivals of half the sustained rate, and in the middle a burst of ``height``."""
    setup = SimulatedSetup(
        num_instances=num_instances,
        max_num_seqs=max_num_seqs,
        memory_utilization=memory_utilization,
    )
    drawn = random_lengths(400, *lengths, 0.2, seed=0)
    able = capacity(build_scenario(setup, Workload((0.0,) * len(drawn), drawn, "all")))
    rate, duration_s = able.full_rate * num_instances, 50.0 + length_s + 40.0
    spike = Spike(50.0 / duration_s, (50.0 + length_s) / duration_s, 2 * height)
    mean = rate / 2 * (1 + (2 * height - 1) * length_s / duration_s)
    arrivals = bursty_arrivals(duration_s, mean, 0, float("inf"), (spike,))
    return build_scenario(setup, Workload(arrivals, drawn.take(len(arrivals)), "one burst"))


def expected(height: float, length_s: float, **how: object) -> Projection:
    asked = scenario(height, length_s, **how)  # type: ignore[arg-type]
    found = outlook(asked, capacity(asked))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("height", "length_s", "how", "kind"),
    [
        (1.3, 5.0, {}, Kind.ROOM),
        (1.7, 20.0, {}, Kind.RIDGE),
        (2.5, 90.0, {}, Kind.TOO_MUCH),
        (2.0, 40.0, {"lengths": (4000, 20)}, Kind.COMPUTE),
        (1.7, 30.0, {"num_instances": 1}, Kind.NO_PARTNER),
        (1.7, 40.0, {"max_num_seqs": 4}, Kind.SEATS),
    ],
)
def test_what_to_expect(height: float, length_s: float, how: dict[str, object], kind: Kind) -> None:
    found = expected(height, length_s, **how)
    assert found.kind is kind, found
    assert found.doubt[0] <= found.by_drop <= found.doubt[1]
    assert (found.by_drop >= 1.5) is (kind is Kind.RIDGE)


def test_the_simulator_says_the_same_of_a_burst_on_the_ridge() -> None:
    asked = scenario(1.7, 20.0)
    found = outlook(asked, capacity(asked))
    assert found is not None
    assert found.height == pytest.approx(1.7, rel=0.1)
    assert found.burst.length_s == pytest.approx(20.0, rel=0.15)
    assert found.base == pytest.approx(0.5, rel=0.15)
    p99_s = {
        name: simulate(find_system(name), asked).metrics.ttft.percentile_s(99.0)
        for name in ("recompute", "drop")
    }
    simulated = p99_s["recompute"] / p99_s["drop"]
    assert simulated > 1.5 and found.by_drop / 2.5 < simulated < 2.5 * found.by_drop


@pytest.mark.parametrize(
    "one",
    [
        SimulatedSetup(num_instances=1, memory_utilization=0.53),
        SimulatedSetup(model="Qwen/Qwen3-30B-A3B", num_instances=1, max_num_batched_tokens=8192),
    ],
    ids=["dense", "sparse"],
)
def test_the_simulator_sustains_what_the_model_says(one: SimulatedSetup) -> None:
    """An instance that gets three times X is soon full, and ends requests at the rate X."""
    lengths = random_lengths(60, 4000, 400, 0.0, seed=0)
    able = capacity(build_scenario(one, Workload((0.0,) * 60, lengths, "all")))
    arrivals = tuple(number / (3 * able.full_rate) for number in range(60))
    result = simulate(
        find_system("recompute"), build_scenario(one, Workload(arrivals, lengths, "even"))
    )
    ends = sorted(record.finish_s for record in result.run.records)
    assert 25 / (ends[40] - ends[15]) == pytest.approx(able.full_rate, rel=0.25)


def test_the_lines_tell_burst_rule_and_trust() -> None:
    text = "\n".join(outlook_lines({1.0: scenario(1.7, 30.0)}))
    assert "Its greatest burst, 3" in text and "from second 5" in text
    found = re.search(r"Weights take (\d+)% of an instance's memory; drops add (\d+)% to", text)
    assert found is not None
    share, gain = (int(number) / 100 for number in found.groups())
    assert gain == pytest.approx(share / (1 - share) / 2, rel=0.15), "half of a pair's layers"
    assert "P99 TTFT falls at most" in text and f"agreed at {AGREED} of {SIMULATED} bursts" in text
    several = outlook_lines({1.0: scenario(1.3, 5.0), 2.0: scenario(1.7, 30.0)})
    assert [line.split(":")[0].strip() for line in several[4:6]] == ["Load 1", "Load 2"]
    assert several[4].endswith("No burst matters: memory never fills.")
    assert outlook_lines({}) == []


def test_traffic_that_never_fills_memory_is_promised_nothing() -> None:
    text = "\n".join(outlook_lines({1.0: scenario(1.3, 5.0)}))
    assert "No burst matters: memory never fills" in text
    assert "at most" not in text and "lower with drops" not in text and "agreed" not in text


def test_the_numbers_of_trust_are_those_of_the_results() -> None:
    results = compared()
    assert len(results) == SIMULATED
    assert sum(one.agrees for one in results) == AGREED


def test_the_map_is_a_table() -> None:
    able = capacity(scenario(1.7, 30.0))
    drawn = make_map(able, heights=(1.02, 1.7), lengths_s=(5.0, 24.0))
    head, high, low = map_rows(drawn)
    assert head == ("burst", "5 s", "24 s")
    assert (high[0], low[0]) == ("1.7 X", "1.02 X")
    assert np.array_equal(drawn.fills, [[False, False], [False, True]])
    assert (low[1], low[2], high[1]) == (".", ".", ".")
    assert high[2] == f"{drawn.by_drop[1, 1]:.1f}/{drawn.by_endless[1, 1]:.1f}*"


@pytest.fixture
def small_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps of a few bursts, because many take seconds."""

    def few(able: Capacity, base: float, *grid: object) -> BurstMap:
        return make_map(able, base, heights=(1.1, 1.7, 2.5), lengths_s=(5.0, 30.0, 60.0))

    monkeypatch.setattr(map_output, "make_map", few)


def call(*args: str) -> Result:
    return CliRunner().invoke(simulate_command, args)


def test_a_map_is_printed_and_drawn(tmp_path: Path, small_maps: None) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{moment / 3:.2f},3000,300\n" for moment in range(100)]
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(rows))
    folder = tmp_path / "out"
    result = call("--map", "--num-instances", "2", "--trace", str(trace), "-o", str(folder))
    assert result.exit_code == 0, result.output
    assert (
        "No burst matters" in result.output and "P99 TTFT: times lower with drops" in result.output
    )
    assert (folder / "map.png").stat().st_size > 10_000
    assert "3000 tokens in and 300 out" in (folder / "map.txt").read_text()
    assert not (folder / "results.jsonl").exists()


def test_a_map_without_traffic_marks_nothing(small_maps: None) -> None:
    result = call("--map", "--duration", "20")
    assert result.exit_code == 0, result.output
    assert "burst, " not in result.output and "Bursts after 0.50 X" in result.output


def test_an_experiment_has_a_map(small_maps: None) -> None:
    path = ROOT / "experiments" / "heavy_weights_14b.toml"
    result = call("--map", "--experiment", str(path), "--scale", "0.12,0.27")
    assert result.exit_code == 0, result.output
    assert "Load 0.12: " in result.output and "Load 0.27: " in result.output
