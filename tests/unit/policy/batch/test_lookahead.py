"""Lookahead formation: balance, the switch, and a formation kept or left."""

from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import pytest

from kunserve.core.cost import CostCoefficients
from kunserve.policy.batch.batch_form import (
    FormationView,
    PromptShare,
    PromptWork,
    form_token_budget,
)
from kunserve.policy.batch.lookahead import (
    Lookahead,
    cut_microbatch,
    form_all,
    form_lookahead,
    looks_ahead,
)
from kunserve.policy.batch.work_line import WorkLine

COST = CostCoefficients(6e-7, 1.07e-3, 0.0117, 0.0117, 1.5e-6, 3.8e-4)
HOW = Lookahead(COST, 64)


def view(**fields: Any) -> FormationView:
    defaults: dict[str, Any] = {
        "decodes": [],
        "prompts": [],
        "num_decodes_in_flight": 0,
        "num_in_flight": 0,
        "num_stages": 2,
        "max_num_tokens": 512,
        "max_num_seqs": 256,
    }
    return FormationView(**(defaults | fields))


def queue(count: int, seed: int = 0, longest: int = 6000) -> list[PromptWork]:
    generator = np.random.default_rng(seed)
    return [PromptWork(0, int(n)) for n in generator.integers(100, longest, count)]


def halved(line: WorkLine, first: int, end: int, depth: int) -> list[int]:
    """The paper's recursion, literally: where cost splits in two, by trying every token."""
    if depth == 0:
        return [first]
    places = np.arange(first + 1, end)
    left = np.array([line.costs(np.array([first, p]))[0] for p in places])
    right = np.array([line.costs(np.array([p, end]))[0] for p in places])
    middle = int(places[np.abs(left - right).argmin()])
    return halved(line, first, middle, depth - 1) + halved(line, middle, end, depth - 1)


def test_cutting_at_once_is_the_papers_recursion() -> None:
    prompts = [PromptWork(0, 400), PromptWork(1500, 350), PromptWork(0, 250)]
    cost = replace(COST, context_s=0.0, sample_s=0.0)
    formation = form_all(view(prompts=prompts, num_stages=4), Lookahead(cost, 150))
    assert formation.num_microbatches == 4
    expected = halved(WorkLine(prompts, cost), 0, 1000, 2)
    assert formation.bounds[:-1].tolist() == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_queued", [8, 100, 1000])
def test_parts_cost_the_same(num_queued: int, num_stages: int) -> None:
    formation = form_all(view(prompts=queue(num_queued), num_stages=num_stages), HOW)
    assert formation.imbalance < 1.05
    assert np.diff(formation.bounds).max() <= 512


def test_balanced_by_tokens_they_would_not() -> None:
    prompts = queue(100)
    line = WorkLine(prompts, COST)
    by_tokens = np.append(np.arange(0, line.num_tokens, 512), line.num_tokens)
    costs = line.costs(by_tokens)[:-1]
    assert costs.max() / costs.mean() > 1.4


def test_decodes_are_part_of_every_microbatch() -> None:
    decodes = [1000] * 60
    formation = form_all(view(prompts=queue(50), decodes=decodes), HOW)
    alone = form_all(view(prompts=queue(50)), HOW)
    assert np.diff(formation.bounds).max() <= 512 - 30
    assert formation.imbalance < 1.05
    assert formation.num_microbatches > alone.num_microbatches


def test_one_short_prompt_for_all_stages() -> None:
    formation = form_all(view(prompts=[PromptWork(0, 400)], num_stages=4), HOW)
    assert formation.num_microbatches == 4
    sizes = np.diff(formation.bounds).tolist()
    assert all(a >= b for a, b in pairwise(sizes)), "later chunks cost more and are smaller"


def test_too_little_for_all_stages_makes_fewer() -> None:
    formation = form_all(view(prompts=[PromptWork(0, 150)], num_stages=4), HOW)
    assert formation.num_microbatches == 2


def test_a_short_queue_is_spread_wider_while_more_wait_for_memory() -> None:
    now = {"prompts": [PromptWork(0, 400)], "decodes": [500] * 200}
    alone, behind = form_all(view(**now), HOW), form_all(view(**now, has_backlog=True), HOW)
    assert alone.num_microbatches == 400 // (3 * 16)
    assert behind.num_microbatches == 400 // 16
    plenty = view(prompts=queue(100), has_backlog=True)
    assert np.diff(form_all(plenty, HOW).bounds).max() > 450, "a long queue fills its steps"


def test_the_switch() -> None:
    plenty = queue(10)
    assert looks_ahead(view(prompts=plenty), 64)
    assert not looks_ahead(view(prompts=plenty, num_stages=1), 64)
    assert not looks_ahead(view(prompts=[PromptWork(0, 100)]), 64)
    assert looks_ahead(view(prompts=[PromptWork(0, 100)], decodes=[50] * 100), 64)
    assert not looks_ahead(view(prompts=[PromptWork(0, 20)], decodes=[50] * 100), 64)
    assert not looks_ahead(view(decodes=[10] * 500), 64)


def test_a_single_stage_is_plain_chunked_prefill() -> None:
    now = view(prompts=queue(10), decodes=[30, 40], num_stages=1)
    assert form_lookahead(now, None, HOW) == (form_token_budget(now), None)


def test_a_pipeline_without_a_queue_fills_the_budget() -> None:
    now = view(prompts=[PromptWork(0, 100)], decodes=[30, 40, 50, 60])
    batch, ongoing = form_lookahead(now, None, HOW)
    assert ongoing is None and batch == form_token_budget(now)


def test_decodes_are_shared_by_cost_not_number() -> None:
    decodes = [8000, 100, 100, 100, 100, 100]
    assert len(form_token_budget(view(decodes=decodes)).decodes) == 3
    assert len(cut_microbatch(view(decodes=decodes), HOW, inf).decodes) == 1


def sizes_after(contexts: list[int], sizes: list[int], num_steps: int) -> list[int]:
    """Sizes of the last microbatches, one for each stage, if at first they are ``sizes``.

    Asserts that every decode runs once in every round of the second half.
    """
    ready, in_flight, num_stages = list(range(len(contexts))), list[list[int]](), len(sizes)
    last_step: dict[int, int] = {}
    for step in range(num_steps):
        if len(in_flight) == num_stages:
            ready += in_flight.pop(0)
        running = [who for batch in in_flight for who in batch]
        now = view(
            decodes=[contexts[who] for who in ready],
            num_decodes_in_flight=len(running),
            context_in_flight=sum(contexts[who] for who in running),
            num_in_flight=len(in_flight),
            num_stages=num_stages,
        )
        num = sizes[step] if step < num_stages else len(form_lookahead(now, None, HOW)[0].decodes)
        batch, ready = ready[:num], ready[num:]
        for who in batch:
            assert step < num_steps // 2 or step - last_step[who] <= num_stages, (step, who)
            last_step[who] = step
        in_flight.append(batch)
    return [len(batch) for batch in in_flight]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([9, 7], [8, 8]),
        ([12, 9], [11, 10]),
        ([5, 2], [4, 3]),
        ([4, 1, 1], [2, 2, 2]),
        ([3, 1, 0, 0], [1, 1, 1, 1]),
    ],
)
def test_uneven_microbatches_even_out(sizes: list[int], expected: list[int]) -> None:
    alike = [500 + 3 * number for number in range(sum(sizes))]
    assert sorted(sizes_after(alike, sizes, 60), reverse=True) == expected


def test_a_few_long_contexts_are_as_much_as_many_short_ones() -> None:
    found = sizes_after([3000, 3000] + [100] * 12, [2, 12], 60)
    assert sorted(found) == [3, 11]


def test_a_formation_is_kept_while_nothing_changes() -> None:
    prompts = queue(20)
    batch, ongoing = form_lookahead(view(prompts=prompts), None, HOW)
    assert ongoing is not None
    rest = advance(prompts, batch.prompts)
    _, second = form_lookahead(view(prompts=rest, num_in_flight=1), ongoing, HOW)
    assert second is not None
    assert second.target_s == ongoing.target_s and second.num_left == ongoing.num_left - 1


@pytest.mark.parametrize(
    "change",
    [
        {"prompts": queue(40, seed=1)},
        {"decodes": [500] * 10},
    ],
    ids=["queue", "decodes"],
)
def test_a_formation_is_left_when_work_changes(change: dict[str, Any]) -> None:
    prompts = queue(20)
    batch, ongoing = form_lookahead(view(prompts=prompts), None, HOW)
    assert ongoing is not None
    now = view(**({"prompts": advance(prompts, batch.prompts), "num_in_flight": 1} | change))
    _, second = form_lookahead(now, ongoing, HOW)
    assert second is not None and second.num_left != ongoing.num_left - 1


def test_its_microbatches_are_those_of_the_formation() -> None:
    prompts = queue(30)
    formation = form_all(view(prompts=prompts), HOW)
    line = WorkLine(prompts, COST)
    ongoing, bounds = None, [0]
    while prompts:
        batch, ongoing = form_lookahead(view(prompts=prompts), ongoing, HOW)
        bounds.append(bounds[-1] + sum(share.num_tokens for share in batch.prompts))
        prompts = advance(prompts, batch.prompts)
    assert len(bounds) - 1 == formation.num_microbatches
    costs = line.costs(np.array(bounds))
    assert costs.max() / costs.mean() < 1.05


def test_a_step_is_never_too_small_nor_too_large() -> None:
    far = [PromptWork(60_000, 400), PromptWork(0, 2000)]
    sizes = np.diff(form_all(view(prompts=far), HOW).bounds)
    assert sizes.max() <= 512 and sizes[:-1].min() >= 64
    batch = cut_microbatch(view(prompts=far), HOW, 0.001)
    assert batch.prompts == [PromptShare(0, 64)]


def test_many_tiny_prompts_do_not_exceed_the_sequences_of_a_step() -> None:
    tiny = [PromptWork(0, 2)] * 300
    formation = form_all(view(prompts=tiny, max_num_seqs=32), HOW)
    chunks = [len(formation.shares(k, tiny)) for k in range(formation.num_microbatches)]
    assert max(chunks) <= 32 and sum(chunks) >= 300
    assert len(cut_microbatch(view(prompts=tiny, max_num_seqs=32), HOW, inf).prompts) == 32


def advance(prompts: list[PromptWork], shares: Any) -> list[PromptWork]:
    left = list(prompts)
    for index, num_tokens in shares:
        prefix, remaining = left[index]
        left[index] = PromptWork(prefix + num_tokens, remaining - num_tokens)
    return [work for work in left if work.remaining]
