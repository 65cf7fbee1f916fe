"""The cost of sparse batches: experts that are touched grow with tokens, ever slower."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kunserve.core.cost import DENSE, CostCoefficients, ExpertChoice
from kunserve.policy.batch.batch_form import FormationView, PromptWork
from kunserve.policy.batch.cost import (
    NARROW_TOKENS,
    Size,
    added_cost,
    batch_cost,
    experts_cost,
    near_size,
    tokens_beside,
)
from kunserve.policy.batch.lookahead import Lookahead, form_all

choices = st.integers(1, 512).flatmap(
    lambda num: st.builds(
        ExpertChoice,
        st.just(num),
        st.integers(1, num),
        st.sampled_from([0.0, 0.25, 0.875, 1.0]),
        st.sampled_from([None, 4.0, 60.0, 1000.0]),
    )
)
costs = st.builds(
    CostCoefficients,
    attention_s=st.floats(0, 1e-5),
    token_s=st.floats(1e-6, 1e-2),
    chunk_s=st.floats(1e-3, 1e-2),
    shared_s=st.floats(0, 1e-3),
    context_s=st.floats(0, 1e-4),
    sample_s=st.floats(0, 1e-3),
    expert_s=st.floats(1e-5, 1e-2),
    experts=choices,
)
chunks = st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 600)), min_size=1, max_size=12)


def cost_of(cost: CostCoefficients, work: list[tuple[int, int]]) -> float:
    prefixes, lengths = zip(*work, strict=True)
    return batch_cost(cost, prefixes, lengths, [1] * len(work))


def test_experts_by_hand() -> None:
    assert [ExpertChoice(4, 2).touched(n) for n in (0, 1, 2)] == [0.0, 2.0, 3.0]
    assert ExpertChoice(8, 8).touched(3) == 8.0 and ExpertChoice(8, 8).touched_by_one_more(3) == 0
    assert DENSE.touched(1000) == DENSE.reads(1000, 1) == 0.0
    alike = ExpertChoice(4, 2, alike=0.5)
    assert [alike.choices(n, 1) for n in (1, 2, 3)] == [1.0, 1.5, 2.0] and alike.choices(3, 3) == 3
    assert alike.reads(3, 1) == 3.0, "three tokens of a prompt choose as two do"
    busy = ExpertChoice(4, 2, rows_per_read=8)
    assert [busy.reads(n, n) for n in (2, 16, 64)] == [3.0, pytest.approx(4.0, abs=1e-3), 16.0]
    with pytest.raises(AssertionError):
        ExpertChoice(8, 9)


@given(choices)
def test_no_token_touches_more_than_its_own_and_none_more_than_there_are(
    choice: ExpertChoice,
) -> None:
    touched = [choice.touched(n) for n in range(200)]
    added = np.diff(touched)
    assert touched[1] == pytest.approx(choice.per_token) and touched[-1] <= choice.num + 1e-9
    assert (added >= -1e-9).all() and (np.diff(added) <= 1e-9).all(), "grows, ever slower"


@given(costs, chunks, st.tuples(st.integers(0, 9000), st.integers(1, 600)))
def test_more_work_never_costs_less(
    cost: CostCoefficients, work: list[tuple[int, int]], one: tuple[int, int]
) -> None:
    sizes = sum(length for _, length in work)
    if sizes > NARROW_TOKENS:
        assert cost_of(cost, [*work, one]) >= cost_of(cost, work)
        longer = [(work[0][0], work[0][1] + 1), *work[1:]]
        assert cost_of(cost, longer) >= cost_of(cost, work)
    assert cost_of(cost, work) == cost_of(cost, list(work)), "pure"


@given(costs, chunks, chunks)
def test_two_batches_never_cost_less_than_one(
    cost: CostCoefficients, one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    """They read what is shared twice, and many experts twice."""
    narrow_s = (cost.token_s + cost.sample_s) * 2 * NARROW_TOKENS
    apart_s = cost_of(cost, one) + cost_of(cost, other) + narrow_s
    assert cost_of(cost, one + other) <= apart_s * (1 + 1e-9)


@given(costs, st.integers(1, 2000), st.integers(1, 40), chunks)
def test_a_tangent_is_exact_at_its_size_and_as_steep(
    cost: CostCoefficients, num_tokens: int, num_chunks: int, work: list[tuple[int, int]]
) -> None:
    size = Size(num_tokens + num_chunks, num_chunks)
    lengths = [num_tokens + 1] + [1] * (num_chunks - 1)
    near = near_size(cost, size)
    assert near.expert_s == 0.0
    assert batch_cost(near, [100] * num_chunks, lengths) == pytest.approx(
        batch_cost(cost, [100] * num_chunks, lengths)
    )
    little = 1e-4
    more_s = experts_cost(cost, Size(size.num_tokens + little, num_chunks))
    slope_s = (more_s - experts_cost(cost, size)) / little
    if not is_knee(cost.experts, size):
        assert near.token_s - cost.token_s == pytest.approx(slope_s, rel=1e-2, abs=1e-9)
    if cost.experts.rows_per_read is None:
        assert cost_of(near, work) >= cost_of(cost, work) * (1 - 1e-9), "concave: never too little"
    assert near_size(near, Size(7, 1)) is near, "a dense model's cost is its own"


def is_knee(experts: ExpertChoice, size: Size) -> bool:
    """Whether arithmetic begins to be longer than reading about there."""
    read = replace(experts, rows_per_read=None).reads(*size)
    return experts.rows_per_read is not None and read == pytest.approx(
        size.num_tokens * experts.per_token / experts.rows_per_read, rel=1e-3
    )


@given(costs, st.integers(0, 9000), st.integers(0, 500), st.floats(0, 5.0))
def test_tokens_beside_is_the_inverse(
    cost: CostCoefficients, prefix: int, num_beside: int, seconds: float
) -> None:
    beside = Size(num_beside, num_beside)
    found = tokens_beside(cost, prefix, seconds, beside, most=2000)
    assert 0 <= found <= 2000 and found == int(found)
    if found:
        assert added_cost(cost, prefix, int(found), beside) <= seconds * (1 + 1e-9)
    if found < 2000:
        assert added_cost(cost, prefix, int(found) + 1, beside) > seconds * (1 - 1e-9)


@given(
    st.builds(
        CostCoefficients,
        attention_s=st.floats(0, 1e-6),
        token_s=st.floats(1e-4, 1e-2),
        chunk_s=st.just(0.01),
        shared_s=st.just(0.0099),
        expert_s=st.floats(1e-5, 1e-2),
        experts=choices,
    ),
    st.integers(2, 4),
    st.lists(st.integers(400, 4000), min_size=10, max_size=30),
)
@example(
    CostCoefficients(
        *(0.0, 1e-4, 0.01, 0.0099), expert_s=1 / 128, experts=ExpertChoice(3, 1, alike=1.0)
    ),
    4,
    [400] * 10,
)
def test_microbatches_of_a_formation_cost_the_same(
    cost: CostCoefficients, num_stages: int, lengths: list[int]
) -> None:
    prompts = [PromptWork(0, length) for length in lengths]
    view = FormationView([], prompts, 0, 0, num_stages, 4096, 1000)
    formation = form_all(view, Lookahead(cost, 64))
    # Cuts are made as if all microbatches were on one side of where arithmetic begins to be longer,
    # and had as many chunks: these are all that counts where a chunk's tokens all choose the same.
    is_smooth = cost.experts.rows_per_read is None and cost.experts.alike < 1.0
    assert formation.imbalance < (1.1 if is_smooth else 1.5)
    parts = np.diff(formation.bounds).tolist()
    experts_s = [experts_cost(cost, Size(size, 1)) for size in parts]
    assert (formation.costs > np.array(experts_s)).all()
