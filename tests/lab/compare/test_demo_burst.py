"""The demo's burst is chosen by how long steps take here."""

from dataclasses import replace

import pytest

from kunserve.core.errors import ConfigError
from kunserve_lab.bench.records import RequestRecord
from kunserve_lab.compare import demo_burst
from kunserve_lab.compare.demo import REQUESTS, SETUP
from kunserve_lab.compare.demo_burst import (
    Burst,
    Expected,
    Pace,
    choose,
    memory_bytes,
    pace_of,
    solve,
)
from kunserve_lab.sim.costs import LOOP_S, MeasuredTimes

PACES = [Pace(0.5, 0.5), Pace(0.15, 0.5), Pace(1.0, 1.0), Pace(2.0, 2.0), Pace(4.0, 4.0)]


def seconds(pace: Pace) -> tuple[float, float]:
    """Of a prompt and of a step of answers, as an instance of that pace has them."""
    times = MeasuredTimes(pace.times(demo_burst.SERVING), 30, LOOP_S)
    prompt = sum(
        times.stage_s([demo_burst._chunk(start, 128)], 30, True) for start in range(0, 512, 128)
    )
    return prompt, times.stage_s([demo_burst._chunk(32, 1)] * 8, 30, True)


@pytest.mark.parametrize("pace", PACES)
def test_a_pace_is_told_from_its_seconds(pace: Pace) -> None:
    found = solve(*seconds(pace), SETUP)
    assert (found.prompts, found.decodes) == pytest.approx((pace.prompts, pace.decodes))


def record(first_s: float, last_s: float, tokens: int, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        0, "", 0.0, 0.0, (first_s, last_s), last_s, last_s, 512, tokens, tokens, "length", error
    )


def test_a_pace_is_told_from_what_the_client_saw() -> None:
    prompt_s, decode_s = seconds(Pace(2.0, 2.0))
    prompts = [record(prompt_s * (1 + i // 2), 9.0, 1) for i in range(8)]
    answers = [record(1.0, 1.0 + 32 * decode_s, 33) for _ in range(16)]
    found = pace_of(prompts, answers, SETUP)
    assert (found.prompts, found.decodes) == pytest.approx((2.0, 2.0))
    with pytest.raises(ConfigError, match="did not answer"):
        pace_of(prompts, [replace(answers[0], error="HTTP 500")], SETUP)


def test_a_reading_that_makes_no_sense_is_still_a_pace() -> None:
    found = solve(1e-6, 1e-6, SETUP)
    assert found == Pace(demo_burst.LEAST_PACE, demo_burst.LEAST_PACE)


def chosen_of(
    pace: Pace, monkeypatch: pytest.MonkeyPatch, **how: bool
) -> tuple[Burst, list[float]]:
    """With a simulator that finds the second candidate good, and the rates that it was asked."""
    asked: list[float] = []

    def expected(burst: Burst, pace: Pace, seed: int) -> tuple[Expected, ...]:
        asked.append(burst.workload.rate)
        gain = 1.5 if len(asked) == 1 else 3.0
        return (Expected((6.0 * gain, 6.0), 150.0),)

    monkeypatch.setattr(demo_burst, "_expected", expected)
    return choose(pace, SETUP, REQUESTS, 0, now=lambda: 0.0, **how), asked


def test_the_first_good_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    burst, asked = chosen_of(Pace(1.0, 1.0), monkeypatch)
    assert len(asked) == 2
    assert burst.workload.rate == asked[1]


def test_a_slow_machine_is_asked_less_a_fast_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = [chosen_of(Pace(p, p), monkeypatch)[0].workload.rate for p in (0.5, 1.0, 2.0)]
    assert rates[0] > 1.7 * rates[1] > 1.7 * 1.7 * rates[2]
    slow, _ = chosen_of(Pace(4.0, 4.0), monkeypatch)
    assert slow.workload.length_scale == 0.5
    weights = 257 << 20
    kept = (memory_bytes(slow.setup) - weights) / (memory_bytes(SETUP) - weights)
    assert kept == pytest.approx(0.5, abs=0.03)
    as_told, _ = chosen_of(Pace(4.0, 4.0), monkeypatch, is_sized=False)
    assert as_told.setup == SETUP
    assert as_told.workload.length_scale == 1.0


def test_what_is_not_over_in_time_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter([Expected((40.0, 4.0), 400.0), *[Expected((6.0, 5.0), 170.0)] * 3])
    monkeypatch.setattr(demo_burst, "_expected", lambda burst, pace, seed: (next(said),))
    burst = choose(Pace(1.0, 1.0), SETUP, REQUESTS, 0, now=lambda: 0.0)
    assert burst.height == demo_burst.HEIGHTS[1]
    assert "waits 6 s with recompute, 5 s with drop" in burst.reason(Pace(1.0, 1.0))


@pytest.mark.slow  # the simulator itself has tests; this is of what it says at every pace
@pytest.mark.parametrize("pace", PACES)
def test_drops_help_at_every_pace(pace: Pace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_burst, "SEARCH_S", 1e9)
    burst = choose(pace, SETUP, REQUESTS, 0)
    assert burst.is_good, burst
