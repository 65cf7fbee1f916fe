"""Measured step times, and coefficients fitted to modelled ones."""

import numpy as np
import pytest

from kunserve.control.instance.body import HeadWork, StepWork
from kunserve.core.errors import TooLittleMemory
from kunserve.core.ids import GroupId, InstanceId, RequestId, StepId
from kunserve.core.layout import LayerRange, VocabRange
from kunserve.core.step import Chunk, StepPlan
from kunserve.policy.batch.cost import batch_cost
from kunserve_lab.profile.cost_forms import as_vector, from_vector
from kunserve_lab.sim.body import SimBody
from kunserve_lab.sim.costs import MeasuredTimes, cpu_profile, profile_times
from kunserve_lab.sim.devices import find_device
from kunserve_lab.sim.models import find_model
from kunserve_lab.sim.profile import gpu_profile
from tests.lab.sim.worlds import burst, run, scenario

BATCH = [Chunk(RequestId("a"), 0, 700, True), Chunk(RequestId("b"), 3000, 1, True)]


def test_measured_times_are_the_cost_model() -> None:
    cost = profile_times(
        gpu_profile(find_model("Qwen2.5-14B"), find_device("a800")).times, 48, 2048
    )
    times = MeasuredTimes(cost, 48)
    assert times.stage_s(BATCH, 48, True) == pytest.approx(
        batch_cost(cost, [0, 3000], [700, 1], [1, 1])
    )
    halves = times.stage_s(BATCH, 24, False) + times.stage_s(BATCH, 24, True)
    assert halves == pytest.approx(times.stage_s(BATCH, 48, True))


def test_the_fit_follows_the_roofline_where_pipelines_work() -> None:
    profile = gpu_profile(find_model("Qwen2.5-14B"), find_device("a800"))
    fitted = MeasuredTimes(profile_times(profile.times, 48, 2048), 48)
    for start, length in ((0, 512), (0, 2048), (4096, 1024), (8192, 2048)):
        chunks = [Chunk(RequestId("r"), start, length, True)]
        true_s = profile.times.stage_s(chunks, 48, True)
        assert fitted.stage_s(chunks, 48, True) == pytest.approx(true_s, rel=0.2)


def test_cpu_instances_serve() -> None:
    model = find_model("smollm2-135m")
    cost = profile_times(gpu_profile(model, find_device("a800")).times, 30, 512)
    profile = cpu_profile(model, cost, cost, 16, 785 << 20)
    assert not profile.reads_during_steps
    result = run("drop", scenario(burst(20, 0.05), profile=profile), is_drained=True)
    assert result.metrics.num_completed == 20
    with pytest.raises(TooLittleMemory, match="needs 257 MiB"):
        cpu_profile(model, cost, cost, 16, 200 << 20)


def test_steps_of_an_instance_without_company_are_faster() -> None:
    """Two instances of one machine share its memory bandwidth."""
    model = find_model("smollm2-135m")
    alone = profile_times(gpu_profile(model, find_device("a800")).times, 30, 512)
    beside = from_vector(2.0 * as_vector(alone))
    one, two = burst(1, 1.0, (100, 50)), burst(2, 0.01, (100, 50))
    profile = cpu_profile(model, beside, alone, 16, 785 << 20)
    single, shared = (run("recompute", scenario(load, profile=profile)) for load in (one, two))
    assert shared.metrics.tpot.median_s == pytest.approx(2 * single.metrics.tpot.median_s, rel=0.2)


def test_stages_of_a_cpu_share_the_output_head() -> None:
    """As they do for real, so the last stage of a pair is no longer than the first."""
    model = find_model("smollm2-135m")
    cost = profile_times(gpu_profile(model, find_device("a800")).times, 30, 512)
    profile = cpu_profile(model, cost, cost, 16, 785 << 20)
    head = profile.spec.head
    assert head is not None and head.num_rows == 49_152 and 7.9 < head.cost_layers < 8.1
    body = SimBody(profile, InstanceId(1))
    plan = StepPlan(GroupId(0), StepId(0), (), (), tuple(BATCH))
    nothing = np.zeros((1, 0), dtype=np.int32)
    layers = LayerRange(15, 30)
    for busy_share in (0.0, 0.5, 1.0):
        whole, shared = (
            body.step_s(
                StepWork(plan, layers, False, True, None, nothing, nothing[0], is_shared),
                busy_share,
            )
            for is_shared in (False, True)
        )
        halves = [
            body.work_s(HeadWork(plan, rows), busy_share)
            for rows in (VocabRange(0, 24_576), VocabRange(24_576, 49_152))
        ]
        assert halves[0] == halves[1] > 0.0
        assert shared + sum(halves) == pytest.approx(whole)
    story = scenario(burst(20, 0.05), profile=profile)
    assert run("static-pp", story, is_drained=True).metrics.num_completed == 20
