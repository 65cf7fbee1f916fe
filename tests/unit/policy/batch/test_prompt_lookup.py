"""What prompt lookup finds: the latest of the longest places, and texts that repeat themselves."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.policy.batch.prompt_lookup import MOST_PLACES, PromptLookup
from tests.examples import examples


def lookup(text: list[int], shortest: int = 2, longest: int = 4) -> PromptLookup:
    made = PromptLookup(shortest, longest)
    made.extend(text)
    return made


def plainly(text: list[int], shortest: int, longest: int, most: int) -> tuple[int, ...]:
    """The same by trying every place."""
    end = len(text)
    for length in range(longest, shortest - 1, -1):
        for place in range(end - 1, length - 1, -1):
            if text[place - length : place] == text[end - length :]:
                return tuple(text[place + i % (end - place)] for i in range(most))
    return ()


def test_what_followed_the_last_tokens_before() -> None:
    assert lookup([1, 2, 3, 4, 5, 9, 1, 2]).find(3) == (3, 4, 5)
    assert lookup([1, 2, 3, 4, 5, 9, 1, 2]).find(0) == ()


def test_one_equal_token_is_too_little() -> None:
    assert lookup([1, 2, 3, 9, 2]).find(3) == ()
    assert lookup([1, 2, 3, 9, 2], shortest=1).find(3) == (3, 9, 2)


def test_nothing_is_found_in_a_short_text() -> None:
    assert lookup([]).find(3) == lookup([1]).find(3) == lookup([1, 1]).find(3) == ()


def test_a_longer_place_goes_before_a_later_one() -> None:
    text = [7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2]
    assert lookup(text).find(1) == (50,)
    assert lookup(text, longest=2).find(1) == (60,), "the latest of equal ones"


def test_a_loop_goes_on() -> None:
    assert lookup([5, 1, 2, 3, 1, 2, 3, 1, 2]).find(5) == (3, 1, 2, 3, 1)
    assert lookup([4, 4, 4]).find(4) == (4, 4, 4, 4)


@settings(max_examples=examples(100))
@given(
    text=st.lists(st.integers(0, 3), max_size=MOST_PLACES),
    cut=st.integers(0, MOST_PLACES),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    most=st.integers(1, 6),
)
def test_it_finds_what_trying_every_place_finds(
    text: list[int], cut: int, shortest: int, more: int, most: int
) -> None:
    made = lookup(text[:cut], shortest, shortest + more)
    made.find(most)
    made.extend(text[cut:])
    assert made.find(most) == plainly(text, shortest, shortest + more, most)
