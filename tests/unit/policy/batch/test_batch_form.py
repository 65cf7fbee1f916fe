"""Token-budget formation: decodes first and spread over the stages, then prompts in order."""

from typing import Any

import pytest

from kunserve.policy.batch.batch_form import (
    FormationView,
    PromptShare,
    PromptWork,
    form_token_budget,
    share_of_decodes,
)
from kunserve.policy.batch.relief import Preemptible, choose_victim


def view(**fields: Any) -> FormationView:
    defaults: dict[str, Any] = {
        "decodes": [],
        "prompts": [],
        "num_decodes_in_flight": 0,
        "num_in_flight": 0,
        "num_stages": 1,
        "max_num_tokens": 16,
        "max_num_seqs": 8,
    }
    return FormationView(**(defaults | fields))


def test_nothing_to_do() -> None:
    batch = form_token_budget(view())
    assert not batch.decodes and not batch.prompts


def test_decodes_come_first_and_prompts_fill_the_budget() -> None:
    prompts = [PromptWork(3, 5), PromptWork(0, 20), PromptWork(0, 2)]
    batch = form_token_budget(view(decodes=[9, 9, 9], prompts=prompts))
    assert list(batch.decodes) == [0, 1, 2]
    assert batch.prompts == [PromptShare(0, 5), PromptShare(1, 8)]


def test_limits_on_sequences_and_tokens() -> None:
    prompts = [PromptWork(0, 1)] * 9
    assert len(form_token_budget(view(prompts=prompts)).prompts) == 8
    batch = form_token_budget(view(decodes=[1] * 7, prompts=prompts))
    assert (len(batch.decodes), len(batch.prompts)) == (7, 1)
    batch = form_token_budget(view(decodes=[1] * 7, prompts=prompts, max_num_tokens=4))
    assert (len(batch.decodes), len(batch.prompts)) == (4, 0)


@pytest.mark.parametrize(
    ("num_stages", "in_flight", "decoding", "ready", "expected"),
    [
        (1, 0, 0, 8, 8),
        (2, 0, 0, 8, 4),  # a drained pipeline is not refilled by one microbatch
        (2, 1, 4, 4, 4),
        (2, 1, 1, 7, 4),  # an uneven one evens out
        (3, 0, 0, 4, 2),
        (3, 1, 2, 2, 1),  # something is left for the third stage
        (3, 2, 3, 1, 1),
        (4, 0, 0, 1, 1),
        (4, 3, 6, 0, 0),
    ],
)
def test_decodes_spread_over_microbatches(
    num_stages: int, in_flight: int, decoding: int, ready: int, expected: int
) -> None:
    seen = view(
        decodes=[5] * ready,
        num_stages=num_stages,
        num_in_flight=in_flight,
        num_decodes_in_flight=decoding,
    )
    assert share_of_decodes(seen) == expected


def test_the_victim_is_the_latest_arrival() -> None:
    running = [
        Preemptible(0, arrival_s, order)
        for arrival_s, order in ((1.0, 4), (3.0, 1), (3.0, 2), (2.0, 9))
    ]
    assert choose_victim(running, 0) == 2
    assert choose_victim(running, 2) is None, "nobody came later: it waits"
    assert choose_victim([Preemptible(0, 0.0, 0)], 0) is None
