"""The cost model is the paper's Eq. 1-3, and its fit finds coefficients again."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kunserve.core.cost import DENSE, CostCoefficients, CostSample, ExpertChoice
from kunserve.model.experts import Experts
from kunserve.model.spec import ModelSpec
from kunserve.policy.batch.cost import (
    MATRIX_FLOPS,
    MEMORY_BYTES_PER_S,
    NARROW_TOKENS,
    assumed_cost,
    batch_cost,
    decode_cost,
    own_cost,
    tokens_within,
    tokens_within_each,
)
from kunserve_lab.profile.cost_fit import fit, held_out_errors, predict, sized
from kunserve_lab.profile.cost_forms import (
    DISTSERVE,
    FORMS,
    NANOFLOW,
    OURS,
    PAPER,
    TOKENS,
    as_vector,
    forms_for,
    from_vector,
)

COST = CostCoefficients(
    attention_s=2.0,
    token_s=100.0,
    chunk_s=50.0,
    shared_s=40.0,
    context_s=3.0,
    sample_s=7.0,
    narrow_s=11.0,
)
EQUATION = CostCoefficients(attention_s=2.0, token_s=100.0, chunk_s=50.0, shared_s=40.0)

chunks = st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 600)), min_size=1, max_size=20)


def test_equation_1_by_hand() -> None:
    # alpha * (p c + (c c + c) / 2) + beta c + gamma with p = 10, c = 4
    assert own_cost(EQUATION, 10, 4) == 2 * (40 + 10) + 100 * 4 + (50 - 40)


def test_equation_3_by_hand() -> None:
    each = [own_cost(EQUATION, 10, 4), own_cost(EQUATION, 0, 3), own_cost(EQUATION, 7, 1)]
    assert batch_cost(EQUATION, [10, 0, 7], [4, 3, 1]) == sum(each) + 40
    assert batch_cost(EQUATION, [], []) == 0.0


def test_the_added_terms() -> None:
    assert own_cost(COST, 10, 4) == own_cost(EQUATION, 10, 4) + 3 * 10
    assert batch_cost(COST, [10], [5], [1]) == batch_cost(COST, [10], [5]) + 7


costs = st.builds(
    CostCoefficients,
    attention_s=st.floats(0, 1e-3),
    token_s=st.floats(1e-6, 1e-2),
    chunk_s=st.floats(1e-3, 1e-2),
    shared_s=st.floats(0, 1e-3),
    context_s=st.floats(0, 1e-4),
)


@given(costs, chunks)
def test_one_chunk_and_many_cost_the_same(
    cost: CostCoefficients, work: list[tuple[int, int]]
) -> None:
    prefixes, lengths = (np.array(column, dtype=np.float64) for column in zip(*work, strict=True))
    each = own_cost(cost, prefixes, lengths)
    assert each.tolist() == [own_cost(cost, prefix, length) for prefix, length in work]
    if lengths.sum() > NARROW_TOKENS:
        assert batch_cost(cost, prefixes, lengths) == pytest.approx(each.sum() + cost.shared_s)
    seconds = each * np.linspace(0.5, 1.5, len(work))
    assert tokens_within_each(cost, prefixes, seconds).tolist() == [
        tokens_within(cost, prefix, s) for (prefix, _), s in zip(work, seconds, strict=True)
    ]


@given(costs, st.integers(0, 9000), st.integers(1, 600))
def test_tokens_within_is_the_inverse(cost: CostCoefficients, prefix: int, length: int) -> None:
    seconds = own_cost(cost, prefix, length)
    assert tokens_within(cost, prefix, seconds) == pytest.approx(length)
    fixed_s = cost.chunk_s - cost.shared_s + cost.context_s * prefix
    assert tokens_within(cost, prefix, 0.5 * fixed_s) == 0.0


def test_a_narrow_batch_pays_for_its_weights_but_not_for_its_tokens() -> None:
    few, more = NARROW_TOKENS, NARROW_TOKENS + 1
    pairs, context = 2 * few * (10 + 1), 3 * few * 10
    narrow = batch_cost(COST, [10] * few, [1] * few, [1] * few)
    assert narrow == pairs + context + 40 + few * (50 - 40) + 11
    wide = batch_cost(COST, [10] * more, [1] * more, [1] * more)
    assert wide == more * (2 * 11 + 3 * 10 + 50 - 40 + 100 + 7) + 40


@given(p=st.integers(0, 5000), lengths=st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_attention_of_a_prompt_does_not_depend_on_its_chunks(p: int, lengths: list[int]) -> None:
    starts = p + np.cumsum([0, *lengths[:-1]])
    assert OURS.pairs(starts, lengths).sum() == OURS.pairs(p, sum(lengths))


@given(chunks)
def test_cost_is_linear_in_the_features(work: list[tuple[int, int]]) -> None:
    prefixes, lengths = zip(*work, strict=True)
    samples = [1, *[0] * (len(work) - 1)]
    direct = batch_cost(COST, prefixes, lengths, samples)
    assert OURS.features(prefixes, lengths, 1) @ as_vector(COST) == pytest.approx(direct)


@given(st.lists(st.integers(0, 5000), min_size=NARROW_TOKENS + 1, max_size=30))
def test_decodes_need_only_their_number_and_context(contexts: list[int]) -> None:
    ones = [1] * len(contexts)
    alone = batch_cost(COST, contexts, ones, ones)
    one_s = own_cost(COST, contexts[0], 1) + COST.sample_s
    assert decode_cost(COST, 1, contexts[0]) == pytest.approx(one_s)
    decodes = decode_cost(COST, len(contexts), sum(contexts))
    assert decodes + COST.shared_s == pytest.approx(alone)


def test_vectors_and_coefficients_are_the_same() -> None:
    assert from_vector(as_vector(COST)) == COST


def test_what_the_criticised_models_do_not_see() -> None:
    assert NANOFLOW.pairs(10, 4) == 40
    assert DISTSERVE.pairs(10, 4) == 10
    assert TOKENS.pairs(10, 4) == 0
    assert PAPER.pairs(10, 4) == OURS.pairs(10, 4) == 50
    assert PAPER.features([10], [4], 1).tolist() == [50, 4, 1, 1, 0, 0, 0, 0]
    assert OURS.features([10], [4], 1).tolist() == [50, 0, 1, 1, 10, 0, 1, 0]
    assert OURS.features([10], [5], 1).tolist() == [65, 5, 1, 1, 10, 1, 0, 0]


def test_nonsense_coefficients_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        CostCoefficients(1.0, 1.0, chunk_s=1.0, shared_s=2.0)


def test_an_unprofiled_model_has_sensible_ratios() -> None:
    spec = ModelSpec("m", "LlamaForCausalLM", 30, 576, 1536, 9, 3, 64, 49152, 8192, 1e4, 1e-5,
                     True, False, False, False, False, None, None, "bfloat16")  # fmt: skip
    cost = assumed_cost(spec)
    # At a prefix of a few thousand tokens attention outweighs everything else of a token.
    assert cost.token_s / cost.attention_s == pytest.approx(1700, rel=0.5)


MEASURED = CostCoefficients(6e-7, 1e-3, 0.012, 0.0115, 2e-6, 3e-4)


def _samples(noise: float, seed: int = 0, cost: CostCoefficients = MEASURED) -> list[CostSample]:
    generator = np.random.default_rng(seed)
    samples = []
    for i in range(120):
        region = ("prefill", "prefix", "decode", "mixed")[i % 4]
        count = int(generator.integers(1, 20))
        lengths = np.ones(count, int) if region == "decode" else generator.integers(1, 100, count)
        prefixes = generator.integers(0, 4000, count) * (region != "prefill")
        num_samples = int(generator.integers(0, count + 1))
        marks = np.arange(count) < num_samples
        seconds = batch_cost(cost, prefixes, lengths, marks) * generator.normal(1.0, noise)
        samples.append(
            CostSample(
                region,
                tuple(prefixes.tolist()),
                tuple(lengths.tolist()),
                num_samples,
                float(seconds),
            )
        )
    return samples


def test_the_fit_finds_the_coefficients_again() -> None:
    samples = _samples(noise=0.0)
    found = from_vector(fit(samples))
    assert found.attention_s == pytest.approx(6e-7, rel=1e-6)
    assert found.token_s == pytest.approx(1e-3, rel=1e-6)
    assert found.chunk_s - found.shared_s == pytest.approx(5e-4, rel=1e-4)
    assert found.sample_s == pytest.approx(3e-4, rel=1e-4)


def test_a_token_costs_something_even_where_noise_hides_it() -> None:
    generator = np.random.default_rng(1)
    samples = [
        replace(s, seconds=float(generator.uniform(0.5, 1.5)) / sum(s.lengths))
        for s in _samples(noise=0.0)
    ]
    found = from_vector(fit(samples))
    assert 0.0 < found.token_s < min(s.seconds for s in samples)


def test_held_out_errors_by_region_tell_the_models_apart() -> None:
    samples = _samples(noise=0.02)
    errors = {form.name: held_out_errors(samples, form) for form in FORMS}
    ours = errors[OURS.name]
    assert set(ours) == {"prefill", "prefix", "decode", "mixed", "all"}
    assert ours["all"].num_samples == len(samples) and ours["all"].mean < 0.03
    assert ours["all"].largest >= ours["all"].mean
    for blind in (DISTSERVE, TOKENS):
        assert errors[blind.name]["prefix"].mean > 3 * ours["prefix"].mean
    assert held_out_errors(samples) == ours, "the same folds every time"


def test_predictions_are_of_the_fitted_form() -> None:
    samples = _samples(noise=0.0)
    predicted = predict(samples, OURS, fit(samples))
    assert predicted == pytest.approx([sample.seconds for sample in samples])


SPARSE = CostCoefficients(
    6e-7, 1e-3, 0.012, 0.0115, 2e-6, 3e-4, expert_s=5e-4, experts=ExpertChoice(64, 8)
)


def test_a_sparse_batch_reads_the_experts_that_its_tokens_chose() -> None:
    dense = replace(SPARSE, expert_s=0.0, experts=DENSE)
    for lengths in ([1], [1, 1, 1], [40, 1]):
        prefixes = [7] * len(lengths)
        experts_s = batch_cost(SPARSE, prefixes, lengths) - batch_cost(dense, prefixes, lengths)
        assert experts_s == pytest.approx(5e-4 * 64 * (1 - (1 - 8 / 64) ** sum(lengths)))
    assert from_vector(as_vector(SPARSE), SPARSE.experts) == SPARSE


def test_the_fit_finds_what_experts_cost_and_a_dense_form_does_not() -> None:
    ours, *others = forms_for(SPARSE.experts)
    samples = _samples(noise=0.02, cost=SPARSE)
    assert from_vector(fit(samples, ours), SPARSE.experts).expert_s == pytest.approx(5e-4, rel=0.1)
    sees, blind = (held_out_errors(samples, form)["decode"].mean for form in (ours, OURS))
    assert sees < 0.05 and blind > 2 * sees
    assert [form.experts for form in others] == [SPARSE.experts] * len(others)


def test_popular_experts_make_a_layer_act_as_one_of_fewer() -> None:
    ours = forms_for(SPARSE.experts)[0]
    samples = _samples(noise=0.0, cost=replace(SPARSE, experts=ExpertChoice(40, 8)))
    assert sized(samples, ours).experts == ExpertChoice(40, 8)
    assert sized(_samples(noise=0.0, cost=SPARSE), ours) == ours
    assert sized(samples, OURS) is OURS, "a dense model has none"


def test_what_tokens_of_a_chunk_share_and_where_arithmetic_begins_are_found() -> None:
    ours = forms_for(SPARSE.experts)[0]
    alike = ExpertChoice(64, 8, alike=0.5)
    found = sized(_samples(noise=0.005, cost=replace(SPARSE, experts=alike)), ours).experts
    assert found.alike == pytest.approx(0.5, abs=0.13) and found.rows_per_read is None
    busy = ExpertChoice(64, 8, rows_per_read=32.0)
    samples = _samples(noise=0.005, cost=replace(SPARSE, token_s=1e-5, experts=busy))
    found = sized(samples, ours).experts
    assert found.rows_per_read == pytest.approx(32.0, rel=0.5) and found.alike <= 0.13


def test_a_dense_models_fit_has_no_experts() -> None:
    assert from_vector(fit(_samples(noise=0.02))).expert_s == 0.0


def test_an_unprofiled_sparse_model_reads_and_computes_what_its_tokens_chose() -> None:
    layers, hidden, inner = 4, 64, 128
    dense = ModelSpec("m", "", layers, hidden, inner, 4, 2, 16, 1000, 512, 1e4, 1e-5,
                      True, False, False, False, False, None, None, "bfloat16")  # fmt: skip
    sparse = replace(dense, experts=Experts(16, 1, normalised=True))
    cost = assumed_cost(sparse)
    router = 2.0 * layers * 16 * hidden / MATRIX_FLOPS
    assert cost.token_s == pytest.approx(assumed_cost(dense).token_s + router)
    everything_s = layers * sparse.layer_bytes / MEMORY_BYTES_PER_S
    assert cost.experts == ExpertChoice(16, 1) and cost.chunk_s == cost.shared_s
    assert cost.shared_s + 16 * cost.expert_s == pytest.approx(everything_s)
    assert assumed_cost(dense).expert_s == 0.0
