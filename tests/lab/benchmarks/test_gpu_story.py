"""The report of a day on a GPU: a function of what the phases have left."""

import json
from pathlib import Path
from typing import Any

from benchmarks import gpu_day
from benchmarks.gpu_kit import story

PHASES = {"P0": "probe", "P5": "speed", "P6": "load", "P7": "spike"}


def figure(name: str, value: float | None, unit: str = "ms", **settings: object) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "settings": settings}


def leave(out: Path, phase: str, outcome: str, *figures: dict[str, Any]) -> None:
    found = {"phase": phase, "device": "cuda", "outcome": outcome, "seconds": 1.0}
    found |= {"figures": figures, "log": [] if outcome == story.DONE else ["it broke here"]}
    (out / f"{phase}.json").write_text(json.dumps(found))


def test_what_was_seen_in_short_in_charts_and_in_full(tmp_path: Path) -> None:
    leave(tmp_path, "P0", story.DONE, figure("copy, read and written", 4300.0, "GB/s"))
    speeds = [
        figure("step reads", 100.0 * n * b, "GB/s", ops="triton", block_size=b, batch=n, context=64)
        for n in (1, 8)
        for b in (16, 64)
    ]
    leave(tmp_path, "P5", "stopped after 9 s", *speeds, figure("prompt speed", None, "TFLOP/s"))
    where = {"system": "drop", "round": 0}
    ratios = [figure("TTFT P99, recompute / drop", r, "", world=w) for w, r in
              (("real", 3.5), ("simulated", 4.25))]  # fmt: skip
    waits = [figure(f"TTFT P{p}", 10.0 * p, world="real", **where) for p in (50, 99)]
    leave(tmp_path, "P7", story.DONE, *waits, *ratios)
    found = {phase: one for phase in PHASES if (one := gpu_day.known(phase, tmp_path))}
    text = story.write_report(tmp_path, PHASES, found).read_text()
    assert "| P6 | load | not run |" in text and "* P6: not run." in text
    assert "P0: The device copies at 4,300 GB/s" in text
    assert "P5: stopped after 9 s." in text and "it broke here" in text
    assert "51,200 GB/s at best" in text
    assert "3.5 times as slow as dropping" in text and "The simulator says 4.25 times" in text
    images = {path.name for path in tmp_path.glob("*.png")}
    assert images == {"P5-steps-that-decode-bytes-read.png", "P7-first-tokens-in-a-burst.png"}
    assert all(f"]({image})" in text for image in images)
    assert "rehearsal" not in text


def test_a_step_is_said_beside_what_a_client_sees_of_it_where_both_are_known(
    tmp_path: Path,
) -> None:
    asked = {"model": "qwen2.5-7b", "sampling": "greedy", "async_scheduling": True}
    seen = [
        figure(name, ms, "ms", streams=num, **asked)
        for name, ms, num in (("TPOT P50", 7.5, 1), ("TPOT P50", 30.0, 32), ("ITL P50", 8.0, 32))
    ]
    leave(tmp_path, "P12", story.DONE, *seen)
    steps = [figure("step by one graph", 2.0, model="qwen3-30b-a3b", batch=1)]
    steps += [
        figure("step by one graph", ms, model="qwen2.5-7b", batch=b)
        for b, ms in ((1, 6.25), (32, 7.0))
    ]
    told = (
        "Of a TPOT of 7.5 ms the step is 6.25 ms.",
        "between tokens of 32 streams the step is 7 ms",
    )
    for is_known in (False, True):
        if is_known:
            leave(tmp_path, "P5", story.DONE, *steps)
        found = {name: one for name in ("P5", "P12") if (one := gpu_day.known(name, tmp_path))}
        text = "\n".join(story.in_short(found, ["P12"]))
        assert "A single stream's TPOT is 7.5 ms." in text
        assert all((one in text) == is_known for one in told), text


def test_every_chart_and_headline_is_of_a_phase_that_there_is() -> None:
    for one in (*story.CHARTS, *story.HEADLINES):
        assert one.phase in gpu_day.PHASES, one
