"""Studies of ideas: what they change of the simulated world, and their table."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.brain.guessing_world import Candidate, Limits, Lookup, Text, num_by_rule
from benchmarks.brain.long_prompts import run as run_lent
from benchmarks.brain.priced_guesses import run as run_guessed
from benchmarks.brain.row_times import RowTimes
from benchmarks.brain.study import SHOWN, table
from benchmarks.paper.points import KeptRun, Point, RunKey
from kunserve.core.cost import CostCoefficients
from kunserve.core.ids import RequestId
from kunserve.core.step import Chunk
from kunserve.policy.batch.speculation import Decode, choose_num_guesses
from kunserve_lab.compare.settings import SimulatedSetup
from kunserve_lab.compare.simulated.scenario import Scenario, build_scenario
from kunserve_lab.sim.devices import find_device
from kunserve_lab.sim.models import find_model
from kunserve_lab.workload.workload import Lengths, Workload

COST = CostCoefficients(6e-9, 1e-4, 0.016, 0.016, context_s=1.4e-7, sample_s=6e-5)
"""About that of Qwen2.5-14B on an A800."""


def scenario(arrivals: tuple[float, ...], num_in: int, num_out: int) -> Scenario:
    lengths = Lengths((num_in,) * len(arrivals), (num_out,) * len(arrivals), "equal")
    setup = SimulatedSetup(num_instances=2, memory_utilization=0.5)
    return build_scenario(setup, Workload(arrivals, lengths, "given"))


def figures(found: object) -> dict[str, float]:
    return {name: value for name, value, _ in found}  # type: ignore[attr-defined]


def test_a_lone_long_prompt_takes_half_the_time_but_for_its_last_chunk() -> None:
    alone = scenario((0.0,), 12_288, 8)
    plain = figures(run_lent("recompute", alone))["P99 TTFT"]
    lent = figures(run_lent("lent", alone))
    free = figures(run_lent("lent-free", alone))["P99 TTFT"]
    assert free < lent["P99 TTFT"] < plain
    assert free == pytest.approx(plain / 2, rel=0.1)
    assert lent["long steps"] == 6 and lent["with help"] == 100.0


def test_who_lends_takes_longer_over_its_next_step() -> None:
    beside = scenario((0.0, 0.5), 3000, 400)
    late = replace(beside, workload=replace(beside.workload, arrival_s=(0.0, 3.0)))
    assert figures(run_lent("lent", late))["lent"] > 0.0
    free, counted = (figures(run_lent(one, late))["P99 TPOT"] for one in ("lent-free", "lent"))
    assert counted > free


def test_short_prompts_stay_at_home() -> None:
    lent = figures(run_lent("lent", scenario((0.0,), 2048, 4)))
    assert lent["long steps"] == lent["lent"] == 0.0


def test_rows_of_a_decode_read_its_kv_once() -> None:
    model, device = find_model("Qwen/Qwen2.5-14B"), find_device("a800")
    times = RowTimes(model, device, 1, reads_once=True)
    one = RequestId("a")
    decode_s = times.stage_s([Chunk(one, 8000, 1, 1)] * 16, 48, True)
    checked_s = times.stage_s([Chunk(one, 8000, 4, 4)] * 16, 48, True)
    apart_s = times.stage_s([Chunk(one, 8000, 1, 1)] * 64, 48, True)
    assert decode_s < checked_s < 1.1 * decode_s < apart_s / 2
    expected_s = times.stage_s([Chunk(one, 8003, 1, 4)] * 16, 48, True)
    more_s = times.more_s(16, 64, 48, 0.0) - times.more_s(16, 64, 0, 0.0)
    assert checked_s == pytest.approx(expected_s + more_s, rel=0.01)
    each = RowTimes(model, device, 1, reads_once=False)
    assert each.stage_s([Chunk(one, 8000, 4, 4)] * 16, 48, True) > 0.9 * apart_s


def test_a_lookup_learns_how_often_it_is_right() -> None:
    lookup = Lookup(Text(1.0, 0.8), random.Random(0), 10)
    seen = []
    for number in range(400):
        lookup.find(11 + 4 * number)
        seen.append(lookup.rate)
    assert 0.7 < sum(seen[100:]) / 300 < 0.9


def test_guesses_make_answers_of_the_same_length_in_fewer_steps() -> None:
    few = scenario((0.0, 0.1, 0.2), 4000, 300)
    plain = figures(run_guessed("recompute", few))
    never = figures(run_guessed("recompute, guesses 0.3", few))
    often = figures(run_guessed("recompute, guesses 0.6", few))
    assert often["P50 TPOT"] < never["P50 TPOT"] < plain["P50 TPOT"]
    assert often["guesses"] > 0.0


def test_a_rule_keeps_rows_beside_prompts_within_the_step_s_tokens() -> None:
    crowd = scenario(tuple(0.3 * one for one in range(24)), 3000, 60)
    plain = figures(run_guessed("recompute", crowd))
    free = figures(run_guessed("recompute, no limits 0.6", crowd))
    bound = figures(run_guessed("recompute, rule 0.6", crowd))
    assert free["guesses"] > bound["guesses"] > 0.0
    assert free["P50 TPOT"] < plain["P50 TPOT"]


def test_a_rule_without_a_price_is_the_policy_where_nobody_has_a_prompt() -> None:
    chance, num_guessing = random.Random(1), 0
    for _ in range(300):
        decodes = [
            Decode(chance.randint(100, 9000), chance.randint(0, 3), 0.5 + chance.random() / 2)
            for _ in range(chance.randint(5, 30))
        ]
        counts = choose_num_guesses(decodes, 2048, COST)
        num_guessing += any(counts)
        ranked = sorted(
            Candidate(one.rate ** (number + 1), at)
            for at, one in enumerate(decodes)
            for number in range(one.num_found)
        )[::-1]
        chunks, places = [(one.num_context, 1) for one in decodes], list(range(len(decodes)))
        num = num_by_rule(ranked, [1.0] * len(decodes), chunks, places, COST, Limits())
        assert Counter(one.decode for one in ranked[:num]) == Counter(dict(enumerate(counts)))
    assert num_guessing > 10


def test_a_table_has_medians_of_ratios_within_a_draw() -> None:
    def run_of(ttft: float) -> KeptRun:
        return KeptRun("code", dict.fromkeys(SHOWN, ttft))

    point = Point("a point", "none", 1.0)
    kept = {
        RunKey(point.name, seed, system): run_of(value)
        for seed, system, value in ((0, "a", 2.0), (0, "b", 1.0), (1, "a", 4.0), (1, "b", 4.0))
    } | {RunKey(point.name, 2, "b"): run_of(9.0)}
    head, of_a, of_b = table(kept, [point], ["a", "b"])
    assert head[:3] == ("point", "variant", "draws")
    assert of_a[1:4] == ["a", "2", "3"]
    assert of_b[1:4] == ["b", "2", "2.5"] and of_b[-1] == "0.75 (0.50-1.00)"
