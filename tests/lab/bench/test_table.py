"""Tables, objectives and verdicts: what they say, and what they must not say."""

import dataclasses
import math

import pytest

from kunserve_lab.compare.experiment import Experiment, World
from kunserve_lab.compare.groups import AtLoad, by_load
from kunserve_lab.compare.output.table import load_text, rows, table
from kunserve_lab.compare.output.verdict import verdict
from kunserve_lab.compare.results import RunResult
from kunserve_lab.compare.slo import one_base, paper_base, violations
from tests.lab.bench.comparisons import result

EVEN = [0.1] * 200


def at(*results: RunResult) -> AtLoad:
    (group,) = by_load(results)
    return group


def line(group: AtLoad, label: str) -> tuple[str, ...]:
    (found,) = [row for row in rows(group) if row[0] == label]
    return found[1:]


@pytest.mark.parametrize(
    ("count", "shown", "hidden"),
    [
        (99, ["TTFT slowest (ms)"], ["TTFT P99 (ms)", "TTFT P99.9 (ms)"]),
        (100, ["TTFT P99 (ms)"], ["TTFT slowest (ms)", "TTFT P99.9 (ms)"]),
        (999, ["TPOT P99 (ms)"], ["TPOT P99.9 (ms)"]),
        (1000, ["TTFT P99 (ms)", "TTFT P99.9 (ms)", "TPOT P99.9 (ms)"], ["TTFT slowest (ms)"]),
    ],
)
def test_a_percentile_is_shown_where_there_are_requests_enough(
    count: int, shown: list[str], hidden: list[str]
) -> None:
    labels = [row[0] for row in rows(at(result("drop", [0.1] * count)))]
    assert set(shown) <= set(labels) and not set(hidden) & set(labels)


def test_the_slowest_request_is_the_slowest() -> None:
    group = at(result("drop", [0.1] * 50 + [9.0]))
    assert line(group, "TTFT slowest (ms)") == ("lower", "9,000")


def test_a_cell_is_the_median_with_its_range() -> None:
    runs = [result("drop", [ttft_s] * 200, number=n) for n, ttft_s in enumerate((0.3, 0.1, 0.2))]
    group = at(*runs)
    assert line(group, "TTFT P99 (ms)") == ("lower", "200 (100-300)")
    assert line(group, "output tokens/s")[0] == "higher"
    assert line(group, "completed") == ("higher", "200")
    assert "3 runs of each system: median (least-most)" in load_text(group)


def test_what_a_real_run_was_measured_under_is_told() -> None:
    real = result(
        "drop", EVEN, world=World.REAL, client_lag_s=0.0123, load_average=(0.5, 2.25),
        cautions=("the client was late",),
    )  # fmt: skip
    group = at(real)
    assert line(group, "client lag P99 (ms)")[1] == "12"
    assert line(group, "load average at end")[1] == "2.2"
    text = load_text(group)
    assert "drop: the client was late" in text and "One run of each system" in text
    assert "One run of each system" not in load_text(at(result("drop", EVEN)))


def test_the_papers_base_is_the_best_baselines() -> None:
    group = at(
        result("recompute", [0.4] * 200, tpot_s=0.02),
        result("static-pp", [0.3] * 200, tpot_s=0.04),
        result("drop", [0.1] * 200, tpot_s=0.03),
    )
    paper, one = paper_base(group), one_base(group)
    assert (paper.ttft_s, paper.ttft_of) == (0.3, "static-pp")
    assert (paper.tpot_s, paper.tpot_of) == (0.02, "recompute")
    assert (one.ttft_s, one.ttft_of) == (0.1, "drop")
    text = load_text(group)
    assert "P50 at this load: TTFT 300 ms (static-pp) and TPOT 20 ms" in text
    assert "  5x the paper's base" in text
    alone = at(result("drop", EVEN))
    assert paper_base(alone) == one_base(alone)
    assert "The paper's base" not in load_text(alone)


def test_all_loads_have_one_objective() -> None:
    """With a base that grows with the load, the same answer is late at one, and good at another."""
    calm, busy = (
        [
            result("recompute", [ttft_s] * 200, load=load),
            result("endless", [ttft_s / 4] * 200, load=load),
        ]
        for load, ttft_s in ((0.5, 0.8), (1.0, 8.0))
    )
    bases = [one_base(group) for group in by_load(busy + calm)]
    assert bases[0] == bases[1]
    assert (bases[0].ttft_s, bases[0].ttft_of, bases[0].load) == (0.2, "endless", 0.5)
    without = [run for run in busy + calm if run.system != "endless"]
    assert {one_base(group).ttft_s for group in by_load(without)} == {0.8}


def test_percentiles_are_over_the_requests_that_all_completed() -> None:
    """Endless memory is not slower for the long prompts that others refuse."""
    nan = float("nan")
    group = at(
        result("recompute", [0.1] * 120 + [nan, nan]),
        result("endless", [0.1] * 120 + [8.0, 9.0]),
    )
    assert line(group, "TTFT P99 (ms)") == ("lower", "100", "100")
    assert line(group, "completed") == ("higher", "120", "122")
    assert "Left out: 2 of endless" in load_text(group)
    few = at(result("recompute", [0.1] * 50 + [nan]), result("endless", [0.1] * 51))
    assert line(few, "TTFT slowest (ms)") == ("lower", "100", "100")


def test_only_draws_of_equal_requests_are_held_beside_each_other() -> None:
    nan = float("nan")
    refused, served = result("recompute", [0.1, nan] * 100), result("endless", EVEN, seed=1)
    dead = result("vllm", [nan] * 200)
    whole = result("endless", EVEN)
    group = at(refused, served, dead, whole)
    left_out = {(run.system, run.seed): len(run.left_out) for run in group.runs}
    assert left_out == {
        ("recompute", 0): 0, ("endless", 1): 0, ("vllm", 0): 0, ("endless", 0): 100,
    }  # fmt: skip


def test_violations_count_failed_requests_and_either_objective() -> None:
    ttft_s = [0.1] * 100 + [0.51] * 25
    run = result("recompute", ttft_s)
    base = paper_base(at(result("recompute", [0.1] * 100)))
    assert violations(run, base, 5.0) == (0.2, 0.2)
    assert violations(run, base, 6.0) == (0.0, 0.0)
    slow = result("recompute", [0.1] * 100, tpot_s=0.11)
    assert violations(slow, base, 5.0) == (1.0, 0.0)


def test_where_a_system_helps() -> None:
    text = table(
        [
            result("recompute", [0.4] * 200, load=0.5),
            result("drop", [0.4] * 200, load=0.5),
            result("recompute", [0.4] * 200, load=1.0),
            result("drop", [0.1] * 200, load=1.0),
        ]
    )
    assert text.splitlines()[-1].split() == ["drop", "4.00x", "1", "1", "(30%", "KV)"]


def test_a_verdict_says_that_memory_never_fills() -> None:
    groups = [at(result("recompute", EVEN, kv_usage=0.2), result("drop", EVEN, kv_usage=0.2))]
    answer, first, second = verdict(Experiment(), groups)
    assert answer == "Does drop help here? No: TTFT P99 is the same (100 ms instead of 100 ms)."
    assert first == (
        "drop against recompute: TTFT P50 the same, P90 the same, P99 the same, TPOT P50 the same."
    )
    assert "memory never fills at this rate (peak KV use 20%)" in second
    assert "Raise the rate about 4.8x (--request-rate" in second


def test_a_verdict_says_what_dropping_costs() -> None:
    runs = [
        dataclasses.replace(result("recompute", [0.8] * 200), longest_pause_s=0.6),
        dataclasses.replace(result("drop", [0.7] * 200, tpot_s=0.03), longest_pause_s=1.8),
    ]
    assert verdict(Experiment(), [at(*runs)])[0] == (
        "Does drop help here? A little: TTFT P99 is 1.1x lower (700 ms instead of 800 ms). "
        "It costs: TPOT P50 30 ms instead of 20 ms, longest pause 1.8 s instead of 600 ms."
    )


def test_runs_of_different_code_are_told() -> None:
    def told(*conditions: dict[str, object]) -> list[str]:
        runs = [result("drop", EVEN, number=n, environment=c) for n, c in enumerate(conditions)]
        return [line for line in load_text(at(*runs)).splitlines() if "different code" in line]

    here, there = {"commit": "a-dirty", "code": "12"}, {"commit": "b", "code": "12"}
    changed = {"commit": "a-dirty", "code": "34"}
    assert told(here, there) == [], "a commit that changed nothing here"
    assert told({"commit": "a"}, {"commit": "a"}) == told({}, {}) == [], "older results"
    (line,) = told(here, there, changed)
    assert line == (
        "Runs of different code: 2 of commit a-dirty with code 12; 1 of commit a-dirty with code 34"
    )
    (line,) = told({"commit": "a"}, changed, {})
    assert "1 of commit a;" in line and "1 of an unknown commit" in line


def test_a_verdict_says_that_compute_runs_out_first() -> None:
    ttft_s = [0.1] * 150 + [8.0] * 50
    groups = [at(result("recompute", ttft_s, kv_usage=0.4), result("drop", ttft_s))]
    assert (
        "compute runs out first, and dropping has nothing to gain"
        in verdict(Experiment(), groups)[-1]
    )


def test_a_verdict_says_what_dropping_gained() -> None:
    runs = [
        one
        for number, gain in enumerate((2.0, 4.0, 8.0))
        for one in (
            result("recompute", [0.8] * 200, number=number, kv_usage=0.99),
            result("drop", [0.8 / gain] * 200, number=number, kv_usage=0.99),
        )
    ]
    answer, first, second = verdict(Experiment(), [at(*runs)])
    assert answer == (
        "Does drop help here? Yes: TTFT P99 is 4.0x lower (200 ms instead of 800 ms)."
    )
    assert "TTFT P50 4.0x lower (2.0-8.0x by run)" in first
    slower = [
        dataclasses.replace(run, system="drop" if run.system == "recompute" else "recompute")
        for run in runs
    ]
    assert "TTFT P50 4.0x higher (2.0-8.0x by run)" in verdict(Experiment(), [at(*slower[::-1])])[1]
    assert second == "load 1: the KV memory is full after 1 s under recompute."


def test_who_refuses_requests_is_measured_by_those_in_time() -> None:
    waits = result("recompute", [0.1] * 100 + [5.0] * 100)
    served = result("sheds", [0.1] * 150 + [math.nan] * 50, num_shed=50)
    group = at(waits, served)
    assert line(group, "refused (503)") == ("lower", "0", "50")
    label, many, more = line(group, "requests/s within 5x")
    assert label == "higher" and float(more) > 1.4 * float(many)
    assert line(group, "TTFT P99 (ms)") == ("lower", "5,000", "100"), "each over its own"
    assert "sheds: its latencies are of the requests that it served" in load_text(group)
    assert not [row for row in rows(at(waits)) if "within" in row[0]]
