"""The cost of layers with a window: they see what is in it, and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kunserve.control.group.scheduler import Scheduler
from kunserve.core.config import SchedulerConfig
from kunserve.core.cost import DENSE, NO_WINDOWS, CostCoefficients, CostSample, Windows
from kunserve.core.ids import GroupId, RequestId
from kunserve.core.plan import Measured
from kunserve.core.request import Request, SamplingParams
from kunserve.core.step import Chunk, SampledToken, StepResult
from kunserve.core.tokens import TokenIds
from kunserve.policy.batch.batch_form import (
    FormationView,
    Microbatch,
    OngoingFormation,
    form_token_budget,
)
from kunserve.policy.batch.cost import (
    batch_cost,
    decode_cost,
    own_cost,
    tokens_within,
    tokens_within_each,
)
from kunserve_lab.profile.cost_fit import fit, predict
from kunserve_lab.profile.cost_forms import OURS, forms_for, from_vector
from kunserve_lab.sim.costs import MeasuredTimes

windows = st.builds(Windows, st.sampled_from([0.5, 5 / 6, 22 / 26, 1.0]), st.integers(1, 2000))
costs = st.builds(
    CostCoefficients,
    attention_s=st.floats(1e-8, 1e-5),
    token_s=st.floats(1e-6, 1e-2),
    chunk_s=st.floats(1e-3, 1e-2),
    shared_s=st.floats(0, 1e-3),
    context_s=st.floats(0, 1e-4),
    sample_s=st.floats(0, 1e-3),
    windows=windows,
)


@given(windows, st.integers(0, 3000), st.integers(1, 40))
def test_pairs_are_what_each_token_sees(seen: Windows, prefix: int, count: int) -> None:
    positions = range(prefix + 1, prefix + count + 1)
    local = sum(min(position, seen.num_tokens) for position in positions)
    full = count * prefix + count * (count + 1) // 2
    mean = seen.share * local + (1 - seen.share) * full
    assert full - seen.hidden_pairs(prefix, count) == pytest.approx(mean)
    assert seen.seen_pairs(prefix, count) == pytest.approx(mean)
    read = seen.share * min(prefix, seen.num_tokens) + (1 - seen.share) * prefix
    assert seen.seen_context(prefix) == pytest.approx(read)
    assert NO_WINDOWS.hidden_pairs(prefix, count) == 0.0


@given(costs, st.integers(0, 9000), st.integers(1, 6000))
def test_tokens_within_is_the_inverse(cost: CostCoefficients, prefix: int, length: int) -> None:
    seconds = own_cost(cost, prefix, length)
    assert tokens_within(cost, prefix, seconds) == pytest.approx(length, rel=1e-6)
    each = tokens_within_each(cost, np.array([float(prefix)]), np.array([seconds]))
    assert each[0] == pytest.approx(length, rel=1e-6)


@given(costs, st.lists(st.integers(0, 9000), min_size=5, max_size=12))
def test_decodes_by_what_they_see(cost: CostCoefficients, contexts: list[int]) -> None:
    """But for the token itself, which is in its own window."""
    ones = [1] * len(contexts)
    seen = sum(map(cost.windows.seen_keys, contexts))
    exact = batch_cost(cost, contexts, ones, ones) - cost.shared_s
    rounding = 2 * len(contexts) * (cost.attention_s + cost.context_s)
    assert decode_cost(cost, len(contexts), seen) == pytest.approx(exact, abs=rounding)


def test_fitted_coefficients_count_windows() -> None:
    true = CostCoefficients(1e-6, 1e-3, 5e-2, 5e-2, 1e-5, 1e-3, windows=Windows(5 / 6, 1024))
    samples = [
        CostSample("mixed", (prefix,), (length,), 1, batch_cost(true, [prefix], [length], [1]))
        for prefix in (0, 512, 2048, 8192)
        for length in (16, 64, 256, 1024)
    ]
    for prefix in (256, 4096):
        for num in (8, 32):
            prefixes, ones = (prefix,) * num, (1,) * num
            seconds = batch_cost(true, prefixes, ones, ones)
            samples.append(CostSample("mixed", prefixes, ones, num, seconds))
    found = from_vector(fit(samples, forms_for(DENSE, true.windows)[0]), DENSE, true.windows)
    assert found.attention_s == pytest.approx(true.attention_s, rel=1e-3)
    assert found.context_s == pytest.approx(true.context_s, rel=1e-3)
    seconds = np.array([sample.seconds for sample in samples])
    blind = np.abs(predict(samples, OURS, fit(samples, OURS)) / seconds - 1.0)
    assert blind.max() > 0.05, "without windows no coefficients fit"


def test_a_simulated_instance_counts_windows_as_the_model_does() -> None:
    cost = CostCoefficients(1e-6, 1e-3, 5e-2, 5e-2, 1e-5, 1e-3, windows=Windows(5 / 6, 1024))
    work = [(0, 700), (900, 300), (5000, 1), (8192, 512)]
    chunks = [Chunk(RequestId("r"), prefix, length, True) for prefix, length in work]
    exact = batch_cost(cost, *zip(*work, strict=True), 1)
    assert MeasuredTimes(cost, 12).stage_s(chunks, 12, True) == pytest.approx(exact)
    whole = replace(cost, windows=NO_WINDOWS)
    assert MeasuredTimes(whole, 12).stage_s(chunks, 12, True) > 1.5 * exact


def test_formation_is_told_what_decodes_read() -> None:
    """And of sequences whose token is on its way."""
    seen: list[FormationView] = []

    def note(
        view: FormationView, ongoing: OngoingFormation | None
    ) -> tuple[Microbatch, OngoingFormation | None]:
        seen.append(view)
        return form_token_budget(view), None

    cost = CostCoefficients(1e-6, 1e-3, 5e-2, 5e-2, windows=Windows(0.5, 20))
    scheduler = Scheduler(
        SchedulerConfig(),
        GroupId(0),
        2,
        4,
        100,
        frozenset(),
        200,
        form_batch=note,
        measured=Measured(cost),
    )
    for number in range(2):
        tokens, sampling = TokenIds([number] * 60), SamplingParams(max_tokens=9)
        scheduler.add(Request(RequestId(str(number)), tokens, sampling, 0.0))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.schedule(0.0)
    assert seen[-1].context_in_flight == 2 * 40, "20 of the window, and half of the others"
    sampled = tuple(SampledToken(row.request_id, 7, None) for row in plan.sampled_rows)
    scheduler.complete(StepResult(plan.group_id, plan.step_id, sampled), 0.0)
    scheduler.schedule(0.0)
    assert seen[-1].decodes == [40, 40]
