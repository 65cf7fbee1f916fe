"""Series for figures, and figures of runs with little in them."""

from pathlib import Path

import numpy as np
from PIL import Image

from kunserve_lab.bench import timeline as tl
from kunserve_lab.bench.output.plot import plot_comparison, plot_timeline
from kunserve_lab.bench.records import RequestRecord, ServerSample
from kunserve_lab.bench.runfile import Run


def record(number: int, sent_s: float, times_s: tuple[float, ...]) -> RequestRecord:
    last_s = times_s[-1] if times_s else None
    error = None if times_s else "HTTP 503: no"
    return RequestRecord(
        number, "x", sent_s, sent_s, times_s, last_s, last_s or sent_s + 0.1, 4, 2,
        len(times_s), None, error,
    )  # fmt: skip


RECORDS = (record(0, 0.0, (1.0, 2.0)), record(1, 0.5, (3.0, 3.5)), record(2, 2.0, ()))
SAMPLES = (
    ServerSample(0.0, kv_usage=0.1, kv_used_blocks=10, kv_capacity_blocks=100, num_drops=0),
    ServerSample(1.0, kv_usage=0.5, kv_used_blocks=90, kv_capacity_blocks=180, num_drops=1),
)


def run(label: str, records: tuple[RequestRecord, ...], samples: tuple[ServerSample, ...]) -> Run:
    return Run(label, "arrivals: x; lengths: y", 4.0, records, samples)


def test_widths_are_round_and_few() -> None:
    assert tl.bin_width_s(640.0) == 10.0
    assert tl.bin_width_s(4.0) == 0.1
    assert tl.bin_width_s(1e6) == 60.0


def test_rates_and_bins() -> None:
    rate = tl.rate_per_bin([0.0, 0.5, 2.0], 4.0, 2.0)
    assert rate.values.tolist() == [1.0, 0.5]
    assert tl.output_rate(RECORDS, 4.0, 1.0).values.tolist() == [0.0, 1.0, 1.0, 2.0]
    times_s, values = tl.ttft_points(RECORDS)
    assert values.tolist() == [1.0, 2.5]
    bins = tl.binned(times_s, values, 4.0, 2.0)
    assert bins.mean[0] == 1.75 and np.isnan(bins.mean[1])


def test_in_flight_and_waiting_start_and_end_at_nothing() -> None:
    for series in (tl.in_flight(RECORDS), tl.waiting(RECORDS)):
        assert series.values[-1] == 0 and series.values.max() == 2


def test_samples_and_counters() -> None:
    assert tl.sampled(SAMPLES, "num_waiting") is None
    used = tl.sampled(SAMPLES, "kv_used_blocks")
    assert used is not None and used.values.tolist() == [10, 90]
    assert tl.increments(SAMPLES, "num_drops").tolist() == [1.0]
    assert tl.increments(SAMPLES, "num_restores").tolist() == []


PIPELINED = (
    ServerSample(0.0),
    ServerSample(1.0, stage_busy_s=10.0, stage_active_s=20.0),
    ServerSample(3.0, stage_busy_s=13.0, stage_active_s=24.0),
    ServerSample(4.0, stage_busy_s=13.5, stage_active_s=25.0),
    ServerSample(5.0, stage_busy_s=15.0, stage_active_s=28.0),
    ServerSample(7.0, stage_busy_s=15.0, stage_active_s=28.0),
)


def test_bubbles_are_the_idle_share_of_each_window_with_work(tmp_path: Path) -> None:
    series = tl.bubbles(PIPELINED)
    assert series is not None and series.times_s.tolist() == [1.0, 3.0, 5.0, 7.0]
    assert series.values[1:3].tolist() == [0.25, 0.5] and np.isnan(series.values[[0, 3]]).all()
    assert tl.whole_bubbles(PIPELINED[1:]) == 1 - 5 / 8
    assert tl.bubbles(SAMPLES) is None and tl.whole_bubbles(SAMPLES) is None
    plot_timeline(run("p", RECORDS, PIPELINED), tmp_path / "with.png")
    plot_timeline(run("p", RECORDS, ()), tmp_path / "without.png")
    with Image.open(tmp_path / "with.png") as one, Image.open(tmp_path / "without.png") as other:
        assert one.height > other.height, "no panel of bubbles"


def test_figures_draw_what_there_is(tmp_path: Path) -> None:
    full = run("full", RECORDS, SAMPLES)
    bare = run("bare", RECORDS[2:], ())
    none = run("none", (), ())
    for name, one in (("full", full), ("bare", bare), ("none", none)):
        plot_timeline(one, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    plot_comparison((full, bare, none, full), tmp_path / "all.png")
    assert (tmp_path / "all.png").stat().st_size > 5000
