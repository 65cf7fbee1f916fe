"""Answers mean the same however they are cut, and nothing of them is lost."""

import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.server.api.parsers.reader import MessageFormat, MessageReader
from kunserve.server.api.parsers.reasoning import REASONING_PARSERS
from tests.unit.server.api.parsers.reading import TOOL_PARSERS, Message, read

Call = tuple[str, dict[str, Any]]
NAMES = list({id(parser): name for name, parser in TOOL_PARSERS.items()}.values())
"""One of each parser."""
MARKS = sorted(
    {mark for parser in TOOL_PARSERS.values() for mark in parser.markers}
    | {"<think>", "</think>", "```", "<parameter=", "<function=f>", '{"name": "f", "arguments": '}
)
HALVES = st.builds(
    lambda mark, n: mark[: n % len(mark)], st.sampled_from(MARKS), st.integers(0, 20)
)
SCRAPS = st.one_of(
    st.sampled_from(MARKS),
    HALVES,
    st.text(max_size=5),
    st.sampled_from([*"{}[]()\"'\\,:;=<>/ \n", "f(x=", "name", "\\u00e9", "\\ud83d", "é", "👍"]),
    st.sampled_from(
        ['{"name": "g", "parameters": {"a": [1, "}"]}}', "[f(x=1, y='a')]", "f[ARGS]{}"]
    ),
)
TEXTS = st.lists(SCRAPS, max_size=12).map("".join)
CUTS = st.lists(st.integers(1, 7), max_size=60)

WORDS = st.text(
    st.characters(exclude_characters="<>[]{}`", exclude_categories=["Cs"]), min_size=1, max_size=8
).filter(lambda text: "functools" not in text)
KEYS = st.text("abc_é", min_size=1, max_size=4).filter(str.isidentifier)
STRINGS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 10**20), st.floats(-1e9, 1e9), STRINGS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(STRINGS, inner, max_size=3)
    ),
    max_leaves=5,
)
CALLS = st.lists(st.tuples(KEYS, st.dictionaries(KEYS, VALUES, max_size=3)), min_size=1, max_size=3)


def cut(text: str, lengths: list[int]) -> list[str]:
    pieces, at = [], 0
    for length in lengths:
        pieces.append(text[at : at + length])
        at += length
    return [*pieces, text[at:]]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(TEXTS, CUTS, st.sampled_from([None, *REASONING_PARSERS]), st.sampled_from([None, 1]))
def test_the_meaning_does_not_depend_on_the_cuts(
    name: str, text: str, lengths: list[int], reasoning: str | None, max_calls: int | None
) -> None:
    form = MessageFormat(
        TOOL_PARSERS[name],
        {"f": {"properties": {"x": {"type": "integer"}}}},
        max_calls,
        None if reasoning is None else REASONING_PARSERS[reasoning],
    )
    whole = read([text], form)
    assert read(cut(text, lengths), form) == whole
    assert read(text, form) == whole
    if not whole.calls and reasoning != "deepseek_r1" and "think>" not in text:
        assert whole.content == text


def _json(calls: list[Call], key: str = "arguments") -> list[str]:
    return [json.dumps({"name": name, key: given}, ensure_ascii=False) for name, given in calls]


def _python(calls: list[Call]) -> str:
    return ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
        for name, given in calls
    )


WRITTEN: dict[str, Callable[[list[Call]], str]] = {
    "granite": lambda calls: f"<|tool_call|>[{', '.join(_json(calls))}]",
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in _json(calls)),
    "jamba": lambda calls: f"<tool_calls>[\n{', '.join(_json(calls))}\n]</tool_calls>",
    "llama3_json": lambda calls: "<|python_tag|>" + "; ".join(_json(calls, "parameters")),
    "mistral": lambda calls: "".join(
        f"[TOOL_CALLS]{name}{json.dumps(given)}" for name, given in calls
    ),
    "pythonic": lambda calls: f"[{_python(calls)}]",
    "llama4_pythonic": lambda calls: f"<|python_start|>[{_python(calls)}]<|python_end|>",
    "xlam": lambda calls: f"```json\n[{', '.join(_json(calls))}]\n```",
}
ONLY_FIRST = ("pythonic", "llama4_pythonic")
"""Parsers of models that say nothing before calls."""


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=25)
@given(CALLS, WORDS, WORDS, CUTS)
def test_what_a_model_writes_is_what_the_client_gets(
    name: str, calls: list[Call], before: str, after: str, lengths: list[int]
) -> None:
    before = "" if name in ONLY_FIRST else before
    text = f"{before}{WRITTEN[name](calls)}{after}"
    message = read(cut(text, lengths), MessageFormat(TOOL_PARSERS[name]))
    assert message.parsed == calls
    assert "".join(message.content.split()) == "".join((before + after).split())


@settings(max_examples=50)
@given(WORDS, WORDS, CUTS, st.booleans(), st.sampled_from(sorted(REASONING_PARSERS)))
def test_reasoning_and_answer(
    thought: str, answer: str, lengths: list[int], opened: bool, name: str
) -> None:
    form = MessageFormat(reasoning=REASONING_PARSERS[name], is_open=opened or None)
    text = ("" if opened else "<think>\n") + f"{thought}\n</think>\n\n{answer}"
    message = read(cut(text, lengths), form)
    assert message == Message(thought.strip(), answer.lstrip())


HOSTILE = {
    "half tags": "<tool_cal",
    "open tags": "<tool_call>",
    "open objects": '<tool_call>{"name": ',
    "calls": '<tool_call>{"name": "f", "arguments": {"x": "y"}}</tool_call>',
    "brackets": '{"name":"f","arguments":[[[[',
    "spaces": "  \n ",
    "strings": '"\\"',
    "lists": "[f(x=[(",
    "marks": "[TOOL_CALLS]f",
    "functions": "<function=f><parameter=x>",
    "ends": "</think",
    "fences": "```json\n",
}


def num_lines(form: MessageFormat, text: str) -> int:
    """Lines of parsers that run when a text comes letter by letter."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += 1
        return trace

    reader = MessageReader(form)
    sys.settrace(trace)
    try:
        for letter in text:
            reader.feed(letter)
        reader.feed("", is_last=True)
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("attack", HOSTILE)
def test_work_grows_with_the_length_only(name: str, attack: str) -> None:
    form = MessageFormat(TOOL_PARSERS[name], reasoning=REASONING_PARSERS["qwen3"])
    once, twice = (num_lines(form, HOSTILE[attack] * times) for times in (25, 50))
    assert twice <= 2.2 * once


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(TEXTS)
def test_little_text_is_held_unread(name: str, text: str) -> None:
    """So a piece that comes costs its own length, not that of all before it."""
    reader = MessageReader(MessageFormat(TOOL_PARSERS[name], {}))
    for letter in text:
        reader.feed(letter)
        assert reader._tape.num_held < max(map(len, MARKS))
