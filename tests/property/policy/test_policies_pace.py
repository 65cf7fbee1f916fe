"""The pace over all that can be."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.core.cost import CostCoefficients, ExpertChoice
from kunserve.policy.batch.batch_form import CHUNK_TOKENS
from kunserve.policy.batch.cost import batch_cost
from kunserve.policy.batch.pace import PaceView, choose_pace

COSTS = st.sampled_from(
    [
        CostCoefficients(6e-9, 1e-4, 0.016, 0.016, 1.4e-7, 5.7e-5),
        CostCoefficients(3e-7, 5e-4, 0.02, 0.0067, 1e-6, 1.6e-4),
        CostCoefficients(0.0, 1.0, 0.0, 0.0),
        CostCoefficients(
            1e-6, 0.012, 0.04, 0.032, 8e-6, 1e-3, expert_s=0.012, experts=ExpertChoice(64, 8)
        ),
        CostCoefficients(
            *(1e-6, 0.012, 0.04, 0.032, 8e-6, 1e-3, 0.0, 0.012),
            ExpertChoice(64, 8, alike=0.5, rows_per_read=24.0),
        ),
    ]
)
VIEWS = st.builds(
    PaceView,
    max_num_batched_tokens=st.integers(1, 9000),
    num_queued_tokens=st.integers(0, 100_000),
    prefix=st.integers(0, 30_000),
    num_decodes=st.integers(0, 1000),
    num_context_tokens=st.integers(0, 10**6),
    num_stages=st.integers(1, 8),
    is_memory_short=st.booleans(),
)
SLOS = st.floats(1e-3, 100.0)


@given(VIEWS, COSTS, SLOS)
@settings(max_examples=300, deadline=None)
def test_the_users_limit_holds_and_something_runs(
    view: PaceView, cost: CostCoefficients, slo_s: float
) -> None:
    size, rounds = choose_pace(view, slo_s, cost)
    assert 1 <= size <= view.max_num_batched_tokens and rounds >= 1
    if view.is_memory_short:
        assert rounds == 1, "slow decodes would hold memory that others wait for"


@given(VIEWS, COSTS, SLOS)
@settings(max_examples=200, deadline=None)
def test_a_step_that_has_more_than_it_must_keeps_the_objective(
    view: PaceView, cost: CostCoefficients, slo_s: float
) -> None:
    view = replace(view, num_stages=1)
    size, rounds = choose_pace(view, slo_s, cost)
    num_decodes, context = view.num_decodes, view.num_context_tokens
    num_prompt = size - num_decodes
    if num_prompt <= CHUNK_TOKENS or num_decodes == 0:
        return
    prefixes = [context, *[0] * (num_decodes - 1), view.prefix]
    lengths, samples = [1] * num_decodes + [num_prompt], [1] * num_decodes + [0]
    took_s = batch_cost(cost, prefixes, lengths, samples)
    alone_s = batch_cost(cost, [view.prefix], [num_prompt])
    assert took_s + (rounds - 1) * alone_s <= slo_s * (1 + 1e-9)


@given(VIEWS, COSTS, SLOS, st.integers(0, 50_000))
@settings(max_examples=200, deadline=None)
def test_a_longer_queue_makes_no_step_smaller(
    view: PaceView, cost: CostCoefficients, slo_s: float, more: int
) -> None:
    longer = replace(view, num_queued_tokens=view.num_queued_tokens + more)
    before, after = choose_pace(view, slo_s, cost), choose_pace(longer, slo_s, cost)
    assert after.max_num_tokens >= before.max_num_tokens
    assert after.decode_rounds >= before.decode_rounds
