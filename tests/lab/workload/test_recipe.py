"""Recipes: what `kunserve bench` asks for, and what it refuses."""

from dataclasses import replace
from pathlib import Path

import pytest

from kunserve.core.errors import ConfigError
from kunserve_lab.workload.recipe import Dataset, Recipe, build_workload
from kunserve_lab.workload.transform import first, scale_time, thin, upscale, upscale_whole, window
from kunserve_lab.workload.workload import Lengths, Workload

TRACE = Workload(
    tuple(float(second) for second in range(10)),
    Lengths(tuple(range(1, 11)), tuple(range(11, 21)), "ten"),
    "one a second",
)


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    rows = "".join(f"{second},{second + 10},5\n" for second in range(100))
    path.write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    return path


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    path.write_text("input,output\n1000,3\n2000,4000\n")
    return path


def test_window_is_rebased_and_half_open() -> None:
    cut = window(TRACE, 2.0, 5.0)
    assert cut.arrival_s == (0.0, 1.0, 2.0)
    assert cut.input_tokens == (3, 4, 5)
    assert "window 2 s to 5 s" in cut.provenance
    assert window(TRACE) is TRACE


@pytest.mark.parametrize("span", [(-1.0, 3.0), (3.0, 3.0), (5.0, 2.0)])
def test_a_window_that_is_none_is_refused(span: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="window"):
        window(TRACE, *span)


def test_an_empty_window_says_what_there_is() -> None:
    with pytest.raises(ConfigError, match="10 requests over 9 s"):
        window(TRACE, 100.0)


def test_first_and_time_scaling() -> None:
    assert first(TRACE, 3).output_tokens == (11, 12, 13)
    assert first(TRACE, 99) is TRACE
    assert scale_time(TRACE, 0.1).duration_s == pytest.approx(0.9)
    assert scale_time(TRACE, 1.0) is TRACE
    with pytest.raises(ConfigError, match="at least 1"):
        first(TRACE, 0)
    with pytest.raises(ConfigError, match="time factor"):
        scale_time(TRACE, 0.0)


def test_upscaling_stops_at_the_original_count() -> None:
    doubled = upscale(TRACE, 2.0, seed=0)
    assert doubled.arrival_s == (0, 0, 1, 1, 2, 2, 3, 3, 4, 4)
    assert doubled.lengths == TRACE.lengths
    whole = upscale_whole(TRACE, 2.0, seed=0)
    assert whole.arrival_s == tuple(float(second // 2) for second in range(20))
    assert whole.input_tokens == TRACE.input_tokens * 2
    with pytest.raises(ConfigError, match="rate factor"):
        upscale(TRACE, -1.0, seed=0)
    with pytest.raises(ConfigError, match="fraction"):
        thin(TRACE, 0.0, seed=0)


def test_the_default_is_vllms_random_dataset() -> None:
    workload = build_workload(Recipe())
    assert len(workload) == 1000 and workload.duration_s == 0.0
    assert set(workload.input_tokens) == {1024} and set(workload.output_tokens) == {128}


def test_a_rate_gives_poisson_arrivals() -> None:
    workload = build_workload(Recipe(num_prompts=20, request_rate=2.0))
    assert workload.duration_s == pytest.approx(10.0)
    assert "Poisson" in workload.provenance


def test_a_trace_is_cut_scaled_and_given_other_lengths(azure: Path, lengths: Path) -> None:
    recipe = Recipe(
        Dataset.AZURE,
        dataset_path=azure,
        lengths_path=lengths,
        trace_start_s=10.0,
        trace_end_s=60.0,
        trace_time_scale=0.5,
        trace_scale=2.0,
        trace_keep_window=True,
        num_prompts=80,
        max_total_tokens=4096,
        length_scale=0.5,
    )
    workload = build_workload(recipe)
    assert len(workload) == 80
    assert workload.arrival_s[:4] == (0.0, 0.0, 0.5, 0.5)
    assert set(zip(workload.input_tokens, workload.output_tokens, strict=True)) == {
        (500, 2),
        (48, 2000),
    }
    for words in ("azure.csv", "TraceUpscaler x2", "lengths.csv", "4096 - output", "x0.5"):
        assert words in workload.provenance
    assert build_workload(recipe) == workload


def test_a_scale_below_one_keeps_every_request_with_its_own_lengths(azure: Path) -> None:
    whole = build_workload(Recipe(Dataset.AZURE, azure))
    half = build_workload(Recipe(Dataset.AZURE, azure, trace_scale=0.5))
    pairs = set(zip(whole.arrival_s, whole.input_tokens, strict=True))
    assert set(zip(half.arrival_s, half.input_tokens, strict=True)) <= pairs
    assert 30 < len(half) < 70 and max(half.input_tokens) > 90
    assert half == build_workload(Recipe(Dataset.AZURE, azure, thin=0.5))


def test_the_bursty_window_follows_rate_and_count() -> None:
    assert 630 < build_workload(Recipe(Dataset.BURSTY, request_rate=5.0)).duration_s <= 640
    short = build_workload(Recipe(Dataset.BURSTY, request_rate=5.0, num_prompts=300))
    assert short.duration_s <= 60 and len(short) <= 300
    fixed = build_workload(Recipe(Dataset.BURSTY, request_rate=5.0, duration_s=30.0))
    assert fixed.duration_s <= 30


def test_a_milder_spike_leaves_more_for_the_rest_of_the_window() -> None:
    recipe = Recipe(Dataset.BURSTY, request_rate=20.0, spike_factor=2.0)
    for workload, expected in ((build_workload(recipe), 2.0), (build_workload(Recipe(
        Dataset.BURSTY, request_rate=20.0)), 4.5)):  # fmt: skip
        num_before = sum(95 <= moment < 410 for moment in workload.arrival_s) / 315
        num_spike = sum(415 <= moment < 480 for moment in workload.arrival_s) / 65
        assert num_spike / num_before == pytest.approx(expected, rel=0.15)
        assert f"{expected:g}x the base rate" in workload.provenance


def test_burstgpt_lengths_replace_those_of_a_trace(azure: Path) -> None:
    recipe = Recipe(Dataset.AZURE, azure, lengths_path=Path("burstgpt-like"), trace_scale=100)
    workload = build_workload(recipe)
    mean_tokens = sum(workload.input_tokens) / len(workload)
    assert len(workload) == 100 and 400 < mean_tokens < 900
    assert "BurstGPT's means" in workload.provenance


def test_lengths_and_timed_traces(tmp_path: Path, lengths: Path) -> None:
    drawn = build_workload(Recipe(Dataset.LENGTHS, dataset_path=lengths, num_prompts=50))
    assert set(drawn.input_tokens) == {1000, 2000}
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            f'{{"timestamp": {moment}, "input_length": 5, "output_length": 6}}\n'
            for moment in (0, 2000)
        )
    )
    assert build_workload(Recipe(Dataset.MOONCAKE, path)).duration_s == 2.0
    assert build_workload(Recipe(Dataset.TIMED_TRACE, path)).duration_s == 2000.0
    scaled = Recipe(Dataset.TIMED_TRACE, path, seconds_per_unit=0.01)
    assert build_workload(scaled).duration_s == 20.0


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Recipe(num_prompts=0), "num_prompts"),
        (Recipe(request_rate=-1.0), "request rate"),
        (Recipe(trace_scale=2.0), "trace_scale does not apply to dataset random"),
        (Recipe(dataset_path=Path("x.csv")), "dataset_path does not apply"),
        (Recipe(duration_s=3.0), "duration_s does not apply"),
        (Recipe(burstiness=0.5), "finite request_rate"),
        (Recipe(max_total_tokens=4096), "lengths_path"),
        (Recipe(Dataset.BURSTGPT), "bursty needs none"),
        (Recipe(Dataset.AZURE, Path("x"), request_rate=3.0), "replays its own arrivals"),
        (Recipe(Dataset.AZURE, Path("x"), trace_model="GPT-4"), "trace_model"),
        (Recipe(Dataset.LENGTHS), "CSV"),
        (Recipe(Dataset.BURSTY, spike_factor=0.5), "at least 1 times the base rate"),
        (Recipe(Dataset.AZURE, Path("x"), spike_factor=2.0), "spike_factor does not apply"),
        (Recipe(Dataset.BURSTY, request_rate=float("inf")), "finite"),
        (Recipe(Dataset.BURSTY, request_rate=0.0, num_prompts=3), "request rate"),
        (Recipe(Dataset.BURSTY, random_input_tokens=3), "random_input_tokens"),
        (Recipe(Dataset.MOONCAKE, Path("x"), seconds_per_unit=0.0), "seconds per unit"),
    ],
)
def test_settings_that_cannot_work_are_refused(recipe: Recipe, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_workload(recipe)


def test_the_bursty_window_is_cut_to_what_a_server_takes() -> None:
    plain = Recipe(Dataset.BURSTY, duration_s=60.0, request_rate=1.2)
    whole, cut = (build_workload(one) for one in (plain, replace(plain, max_total_tokens=3072)))
    assert cut.arrival_s == whole.arrival_s and cut.output_tokens == whole.output_tokens
    totals = [sum(pair) for pair in zip(cut.input_tokens, cut.output_tokens, strict=True)]
    assert max(totals) == 3072
    with pytest.raises(ConfigError, match="an output alone is as long"):
        build_workload(replace(plain, max_total_tokens=300))
