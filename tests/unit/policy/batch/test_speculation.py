"""How many guesses a step checks, by its cost and by how often they were right."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.core.cost import CostCoefficients
from kunserve.policy.batch.cost import batch_cost
from kunserve.policy.batch.speculation import (
    FIRST_RATE,
    MIN_GAIN,
    MOST_DELAY,
    MOST_ROWS,
    Decode,
    choose_num_guesses,
    learned_rate,
)
from tests.examples import examples

CPU = CostCoefficients(
    attention_s=3e-7, token_s=1.1e-3, chunk_s=0.0125, shared_s=0.0125, sample_s=3e-4
)
"""SmolLM2-135M on one core: up to four rows cost what one costs."""


def chosen(*decodes: Decode, rows: int = 512) -> list[int]:
    return choose_num_guesses(decodes, rows, CPU)


def test_one_stream_fills_the_rows_that_cost_nothing() -> None:
    assert chosen(Decode(300, 4, 0.95)) == [3], "a fifth row costs half a step"
    assert chosen(Decode(300, 4, 0.5)) == [3]
    assert chosen(Decode(300, 4, 0.3)) == [2], "even those cost a little"
    assert chosen(Decode(300, 9, 0.98)) == [9], "here more rows pay again"
    assert chosen(Decode(300, 2, 0.95)) == [2]


def test_guesses_that_are_never_right_are_not_checked() -> None:
    assert chosen(Decode(300, 4, 0.1)) == [0]
    assert chosen(Decode(300, 0, 0.9)) == [0]


def test_two_streams_share_the_rows_that_cost_nothing() -> None:
    assert chosen(Decode(300, 4, 0.6), Decode(300, 4, 0.6)) == [1, 1]
    assert chosen(Decode(300, 4, 0.9), Decode(300, 0, 0.5)) == [2, 0]


def test_eight_streams_guess_only_what_is_nearly_sure() -> None:
    assert chosen(*[Decode(300, 4, FIRST_RATE)] * 8) == [0] * 8
    copying = chosen(*[Decode(300, 4, 0.97)] * 8)
    assert min(copying) >= 1
    mixed = chosen(*[Decode(300, 4, 0.97)] * 4, *[Decode(300, 0, 0.5)] * 4)
    assert sum(mixed) <= 2, "four others would wait for every row"


def test_without_a_known_cost_a_typical_one_is_assumed() -> None:
    assert choose_num_guesses([Decode(300, 4, 0.9)], 512, None) == [3]
    assert choose_num_guesses([Decode(300, 4, 0.5)] * 8, 512, None) == [0] * 8


def test_the_rows_of_a_step_are_bounded() -> None:
    assert chosen(Decode(300, 4, 0.9), rows=1) == [0]
    assert chosen(Decode(300, 4, 0.9), rows=3) == [2]
    assert 1 + chosen(Decode(300, 500, 1.0))[0] <= MOST_ROWS


def test_the_rate_follows_what_was_checked() -> None:
    assert learned_rate(0.5, (), (1, 2)) == 0.5
    assert learned_rate(0.5, (1, 2, 3), ()) == 0.5, "nothing is known yet"
    assert learned_rate(0.5, (1,), (1, 2)) == pytest.approx(0.55)
    assert learned_rate(0.5, (1,), (2,)) == pytest.approx(0.45)
    assert learned_rate(0.5, (1, 9, 9), (1, 2, 9)) == pytest.approx(0.495), "the third says nothing"


@settings(max_examples=examples(100))
@given(
    decodes=st.lists(
        st.builds(
            Decode, st.integers(1, 4000), st.integers(0, 6), st.sampled_from([0.0, 0.3, 0.8, 1.0])
        ),
        min_size=1,
        max_size=16,
    ),
    rows=st.integers(1, 64),
    token_s=st.sampled_from([1e-9, 1e-4, 1e-3, 1e-2]),
)
def test_nobody_waits_long_for_the_guesses_of_others(
    decodes: list[Decode], rows: int, token_s: float
) -> None:
    cost = CostCoefficients(3e-7, token_s, 0.0125, 0.0125, sample_s=token_s / 4)
    counts = choose_num_guesses(decodes, rows, cost)
    assert len(counts) == len(decodes)
    assert all(0 <= n <= one.num_found for n, one in zip(counts, decodes, strict=True))
    if not any(counts):
        return
    assert sum(counts) + len(decodes) <= min(rows, MOST_ROWS)

    def seconds(lengths: list[int]) -> float:
        return batch_cost(cost, [one.num_context for one in decodes], lengths, lengths)

    delay = seconds([1 + n for n in counts]) / seconds([1] * len(decodes))
    each = [
        1 + sum(one.rate ** (i + 1) for i in range(n))
        for n, one in zip(counts, decodes, strict=True)
    ]
    assert delay <= MOST_DELAY + 1e-9 or min(each) >= delay - 1e-9
    assert sum(each) / len(each) / delay >= MIN_GAIN - 1e-9
