"""What a day on an H100 left is kept whole, of one code, and tells what the documents say of it."""

import json
import re
from dataclasses import replace

import pytest

from benchmarks import gpu_day
from benchmarks.gpu_kit import kept_day, story
from benchmarks.gpu_phases.machine import SHAPES
from kunserve.model.profile import ProfileSubject, find_cost, read_profile
from kunserve_lab.compare.settings import SimulatedSetup, WorkloadSettings, workload_of
from kunserve_lab.compare.simulated.scenario import build_scenario

SUBJECT = ProfileSubject.of(replace(SHAPES["7b"], name="Qwen/Qwen2.5-7B"), 1, 64)
"""What `serve Qwen/Qwen2.5-7B --device cuda` asks a profile for."""


def test_the_kept_phases_are_a_day_and_say_what_did_not_run() -> None:
    found = {name: one for name in gpu_day.PHASES if (one := gpu_day.known(name, kept_day.DAY))}
    assert {one["device"] for one in found.values()} == {"cuda"}
    said = story.in_short(found, list(gpu_day.PHASES))
    assert "* P12: not run." in said and "* P9: not run." in said
    assert any("10 answers through a drop" in line for line in said)
    assert any(line.startswith("* P5, 14b, tokens by graphs: failed") for line in said)


def test_phases_and_runs_are_of_one_code() -> None:
    facts = {one["settings"].get("subject"): one for one in kept_day.phase("S")["figures"]}
    code = facts["code"]["settings"]["text"]
    assert {run.environment["code"] for run in kept_day.burst_runs().values()} == {code}


def test_the_ratio_that_is_told_is_that_of_the_kept_runs() -> None:
    runs = kept_day.burst_runs()
    assert tuple(runs) == kept_day.BURST_SYSTEMS
    waits = [runs[name].ttft_p99_s for name in kept_day.BURST_SYSTEMS]
    assert waits[0] / waits[1] == pytest.approx(kept_day.ratio("real"), rel=1e-3)
    assert len({run.num_requests for run in runs.values()}) == 1
    assert not any(run.num_failed for run in runs.values())


def test_nothing_kept_names_a_place_on_that_machine() -> None:
    for path in (kept_day.PROFILE, *kept_day.DAY.iterdir()):
        assert not re.search(r"/(?:tmp|root|home|work)\b|GPU-[0-9a-f]{4}", path.read_text()), path


def test_bold_is_what_is_worse_than_expected_and_nothing_else() -> None:
    seen = {row[0]: row[1] for row in kept_day.gpu_day()[1:]}
    assert seen["longest pause of a stream (ms)"].count("**") == 6
    assert "**" in seen["S: a hop there and back, added to a step (ms)"]
    assert "**" not in seen["P4: graphs recorded again"]
    step = seen["P5: a decode step of 7B at 1, 32, 256 (ms)"]
    assert re.fullmatch(r"\*\*6\.4\*\*, 6\.9, 14\.0", step)


def test_a_figure_that_is_not_there_is_no_empty_cell() -> None:
    with pytest.raises(KeyError, match="P5 has no"):
        kept_day.figure("P5", "step by one graph", model="qwen2.5-14b", batch=1)


def test_the_profile_serves_and_simulates() -> None:
    cost, origin = find_cost(SUBJECT, kept_day.PROFILE)
    assert cost == read_profile(kept_day.PROFILE).coefficients and origin == str(kept_day.PROFILE)
    setup = SimulatedSetup(profile=kept_day.PROFILE, num_instances=2, instance_mib=16_705)
    workload = workload_of(WorkloadSettings(), 1.0, seed=0)
    instance = build_scenario(setup, workload).profile
    assert instance.model.name == SUBJECT.model and instance.spec.num_layers == SUBJECT.num_layers
    held_out = kept_day.figure("P8", "held-out error", of="kunserve", batches="all")
    errors = json.loads(kept_day.PROFILE.read_text())["errors"]["kunserve"]["all"]
    assert 100 * errors["mean"] == pytest.approx(held_out, rel=1e-3)
