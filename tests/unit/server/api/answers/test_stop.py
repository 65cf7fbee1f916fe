"""Stop strings: the same cut however the text arrives, and nothing of one ever shown."""

import sys
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kunserve.server.api.answers.stop import StopMatcher, StopStrings

STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)
PIECES = st.lists(st.text("abc", max_size=4), max_size=20)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By definition: the earliest end of any stop string, the longest that ends there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(PIECES, STOPS, st.booleans())
def test_the_cut_depends_on_the_text_alone(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    matcher = StopMatcher(StopStrings(stops), include)
    shown = ""
    expected, matched = reference("".join(pieces), stops, include)
    for piece in pieces:
        shown += matcher.feed(piece)
        assert expected.startswith(shown)  # nothing shown is ever taken back
    shown += matcher.finish()
    assert (shown, matcher.matched) == (expected, matched)


@given(PIECES, STOPS)
def test_no_more_is_held_back_than_may_become_a_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(StopStrings(stops))
    shown = text = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        text += piece
        if matcher.matched is not None:
            return
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["Hello", " wor", "ld"], ["world"], "Hello "),
        (["a", "b", "a", "b", "c"], ["abc"], "ab"),
        (["aab"], ["ab", "b"], "a"),
        (["x"], ["xyz"], "x"),
    ],
)
def test_examples(pieces: list[str], stops: list[str], expected: str) -> None:
    matcher = StopMatcher(StopStrings(stops))
    shown = "".join(matcher.feed(piece) for piece in pieces) + matcher.finish()
    assert shown == expected


def test_silence_after_a_match() -> None:
    matcher = StopMatcher(StopStrings(["b"]))
    assert matcher.feed("abc") == "a"
    assert matcher.feed("more") == matcher.finish() == ""


def test_the_cost_does_not_grow_with_the_strings() -> None:
    """Lines run per character, where one string goes on and on and the others never begin."""
    strings = [*("b" * 300 + chr(0x100 + number) for number in range(15)), "a" * 300]
    matcher = StopMatcher(StopStrings(strings))
    steps = 0

    def count(frame: FrameType, event: str, _argument: object) -> object:
        nonlocal steps
        frame.f_trace_lines = True
        steps += event == "line"
        return count

    sys.settrace(count)  # type: ignore[arg-type]
    try:
        for _ in range(200):
            matcher.feed("a")
    finally:
        sys.settrace(None)
    assert steps < 200 * len(strings) * 12
