"""Lookahead formation over random queues: nothing lost, nothing out of order, nobody starved."""

from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.core.cost import CostCoefficients, ExpertChoice, Windows
from kunserve.policy.batch.batch_form import FormationView, PromptWork
from kunserve.policy.batch.cost import NARROW_TOKENS, batch_cost
from kunserve.policy.batch.lookahead import Lookahead, cut_microbatch, form_all, form_lookahead
from tests.examples import examples

MEASURED = CostCoefficients(6e-7, 1.07e-3, 0.0117, 0.0117, 1.5e-6, 3.8e-4)
STEEP = CostCoefficients(1e-5, 1e-3, 0.05, 0.01, 1e-4, 2e-3)
FLAT = CostCoefficients(0.0, 1.0, 0.0, 0.0)
SPARSE = CostCoefficients(
    1e-6, 0.012, 0.04, 0.032, 8e-6, 1e-3, 0.0, expert_s=0.012, experts=ExpertChoice(64, 8)
)
"""OLMoE-1B-7B on one core."""
VERY_SPARSE = CostCoefficients(0.0, 1e-3, 0.0, 0.0, expert_s=0.1, experts=ExpertChoice(1024, 1))
"""Where most of a microbatch's cost is experts that only its own tokens touch."""
LOCAL = CostCoefficients(1e-5, 1e-3, 0.05, 0.01, 1e-4, 2e-3, windows=Windows(5 / 6, 1024))

prompts = st.lists(
    st.builds(PromptWork, st.sampled_from([0, 0, 0, 16, 700, 6000]), st.integers(2, 4000)),
    min_size=1,
    max_size=40,
)
ALIKE = replace(SPARSE, experts=ExpertChoice(64, 8, alike=0.5, rows_per_read=24.0))
"""Where a prompt's tokens choose alike, and large microbatches are arithmetic."""
costs = st.sampled_from([MEASURED, STEEP, FLAT, SPARSE, VERY_SPARSE, LOCAL, ALIKE])


@st.composite
def views(draw: st.DrawFn) -> FormationView:
    num_stages = draw(st.integers(2, 4))
    return FormationView(
        decodes=draw(st.lists(st.integers(1, 6000), max_size=40)),
        prompts=draw(prompts),
        num_decodes_in_flight=(flying := draw(st.integers(0, 40))),
        num_in_flight=draw(st.integers(0, num_stages - 1)),
        num_stages=num_stages,
        max_num_tokens=draw(st.integers(64, 600)),
        max_num_seqs=draw(st.integers(24, 64)),
        context_in_flight=flying * 500,
    )


@given(views(), costs, st.integers(1, 128))
@settings(max_examples=examples(60))
def test_without_prompts_decodes_are_shared_out_as_with_them(
    view: FormationView, cost: CostCoefficients, min_tokens: int
) -> None:
    how, alone = Lookahead(cost, min_tokens), replace(view, prompts=[])
    assert form_lookahead(alone, None, how) == (cut_microbatch(alone, how, inf), None)
    _, ongoing = form_lookahead(view, None, how)
    if ongoing is not None:  # nothing of it is left to be planned
        assert form_lookahead(alone, ongoing, how) == form_lookahead(alone, None, how)


@given(views(), costs, st.integers(1, 128))
@settings(max_examples=examples(60))
def test_a_formation_holds_every_token_once_in_order(
    view: FormationView, cost: CostCoefficients, min_tokens: int
) -> None:
    formation = form_all(view, Lookahead(cost, min_tokens))
    bounds = formation.bounds.tolist()
    assert bounds[0] == 0 and bounds[-1] == sum(work.remaining for work in view.prompts)
    assert all(a < b for a, b in pairwise(bounds))
    done = [0] * len(view.prompts)
    finished: list[int] = []
    for k in range(formation.num_microbatches):
        for index, num_tokens in formation.shares(k, view.prompts):
            assert num_tokens > 0
            done[index] += num_tokens
            if done[index] == view.prompts[index].remaining:
                finished.append(index)
    assert done == [work.remaining for work in view.prompts]
    assert finished == sorted(finished), "first tokens out of order"


@given(views(), costs, st.integers(1, 64))
@settings(max_examples=examples(60))
def test_a_formation_keeps_the_limits(
    view: FormationView, cost: CostCoefficients, min_tokens: int
) -> None:
    formation = form_all(view, Lookahead(cost, min_tokens))
    sizes = np.diff(formation.bounds)
    flying = len(view.decodes) + view.num_decodes_in_flight
    decodes = min(-(-flying // view.num_stages), view.max_num_tokens - 1)
    most, least = view.max_num_tokens - decodes, max(1, min_tokens - decodes)
    most_seqs = max(1, view.max_num_seqs - decodes)
    assert sizes.max() <= most
    chunks = [len(formation.shares(k, view.prompts)) for k in range(len(sizes))]
    assert max(chunks) <= most_seqs
    # Only the last one, or one that is full of short prompts, may be smaller.
    for size, count in list(zip(sizes.tolist(), chunks, strict=True))[:-1]:
        assert size >= min(least, most) or count == most_seqs


@given(views(), costs)
@settings(max_examples=examples(50))
def test_predicted_costs_are_those_of_the_chunks(
    view: FormationView, cost: CostCoefficients
) -> None:
    view = FormationView([], view.prompts, 0, 0, view.num_stages, view.max_num_tokens, 1000)
    formation = form_all(view, Lookahead(cost, 1))
    done = [0] * len(view.prompts)
    for k, predicted in enumerate(formation.costs.tolist()):
        shares = formation.shares(k, view.prompts)
        prefixes = [view.prompts[i].prefix + done[i] for i, _ in shares]
        for i, num_tokens in shares:
            done[i] += num_tokens
        ends = [done[i] == view.prompts[i].remaining for i, _ in shares]
        lengths = [n for _, n in shares]
        if sum(lengths) > NARROW_TOKENS:
            assert np.isclose(predicted, batch_cost(cost, prefixes, lengths, ends))


@given(views(), costs, st.integers(16, 64))
@settings(max_examples=examples(50))
def test_running_a_course_to_its_end_serves_everybody(
    view: FormationView, cost: CostCoefficients, min_tokens: int
) -> None:
    """Microbatch by microbatch, as a scheduler does, decodes coming back after S of them."""
    how = Lookahead(cost, min_tokens)
    prompts, contexts = list(view.prompts), view.decodes
    last_step = dict.fromkeys(range(len(contexts)), 0)
    flights: list[list[int]] = []
    course = None
    for step in range(1, 5000):
        if not prompts:
            break
        flying = [name for flight in flights for name in flight]
        ready = sorted(last_step.keys() - set(flying), key=lambda name: last_step[name])
        now = FormationView(
            [contexts[name] for name in ready],
            prompts,
            len(flying),
            len(flights),
            view.num_stages,
            view.max_num_tokens,
            view.max_num_seqs,
            sum(contexts[name] for name in flying),
        )
        batch, course = form_lookahead(now, course, how)
        assert batch.prompts and batch.prompts[0].prompt == 0, "the first prompt starves"
        assert [share.prompt for share in batch.prompts] == list(range(len(batch.prompts)))
        for index, num_tokens in batch.prompts[:-1]:
            assert num_tokens == prompts[index].remaining, "one was overtaken"
        total = len(batch.decodes) + sum(share.num_tokens for share in batch.prompts)
        assert total <= view.max_num_tokens
        assert len(batch.decodes) + len(batch.prompts) <= view.max_num_seqs
        index, num_tokens = batch.prompts[-1]
        prefix, remaining = prompts[index]
        rest = [PromptWork(prefix + num_tokens, remaining - num_tokens)]
        prompts = (rest if num_tokens < remaining else []) + prompts[index + 1 :]
        flights.append(ready[: len(batch.decodes)])
        last_step.update(dict.fromkeys(flights[-1], step))
        assert min(last_step.values(), default=step) > step - 4 * view.num_stages, "starved"
        if len(flights) == view.num_stages:
            flights.pop(0)
    assert not prompts, "work is left"


@given(st.lists(st.integers(1, 6000), min_size=1, max_size=60), st.integers(2, 4), costs)
def test_after_a_drain_decodes_do_not_pack_together(
    contexts: list[int], num_stages: int, cost: CostCoefficients
) -> None:
    how, ready, counts = Lookahead(cost, 64), list(contexts), []
    flying: list[int] = []
    for in_flight in range(num_stages):
        view = FormationView(ready, [], len(flying), in_flight, num_stages, 512, 256, sum(flying))
        count = len(cut_microbatch(view, how, float("inf")).decodes)
        counts.append(count)
        flying += ready[:count]
        ready = ready[count:]
    assert counts[0] > 0 and len(ready) <= 1, "more than one is left over"
    if cost is FLAT:
        assert not ready and max(counts) - min(counts) <= 1
