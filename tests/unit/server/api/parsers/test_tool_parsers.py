"""Parsers of tool calls, by examples that models write."""

import json
import re

import pytest

from kunserve.server.api.parsers.forced import REQUIRED, named
from kunserve.server.api.parsers.reader import MessageFormat
from tests.unit.server.api.parsers.reading import TOOL_PARSERS, Message, read, read_by

WEATHER = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "place": {"type": "object"},
        },
    }
}
PARIS = [("weather", {"city": "Paris", "days": 2})]
CALL = '{"name": "weather", "arguments": {"city": "Paris", "days": 2}}'
ONE_CALL = {
    "granite": f"<|tool_call|>[{CALL}]",
    "granite4": f"<tool_call>{CALL}</tool_call>",
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "jamba": f"<tool_calls>[{CALL}]</tool_calls>",
    "llama3_json": '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}',
    "llama4_json": CALL,
    "llama4_pythonic": '<|python_start|>[weather(city="Paris", days=2)]<|python_end|>',
    "mistral": f"[TOOL_CALLS] [{CALL}]",
    "phi4_mini_json": f"functools[{CALL}]",
    "pythonic": "[weather(city='Paris', days=2)]",
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    "qwen3_xml": "<function=weather><parameter=city>Paris</parameter><parameter=days>2"
    "</parameter></function>",
    "xlam": f"[{CALL}]",
}


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_one_call(name: str) -> None:
    message = read_by(name, ONE_CALL[name] + "\n", tools=WEATHER)
    assert (message.parsed, message.content) == (PARIS, "")


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_a_text_without_calls_is_content(name: str) -> None:
    text = " It is 12 °C in [Paris] <b>now</b>: {\"no\": 'call'}; f(x) \n"
    assert read_by(name, text) == Message(content=text)


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_an_empty_answer(name: str) -> None:
    assert read_by(name, "") == Message()


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_a_call_that_breaks_off_does_not_parse_or_is_content(name: str) -> None:
    """Nothing lost, and no call that looks whole."""
    text = ONE_CALL[name]
    for length in range(1, text.index("2")):
        message = read_by(name, text[:length], tools=WEATHER)
        if message.calls:
            assert [one[0] for one in message.calls] == ["weather"]
            assert message.content == ""
            with pytest.raises(ValueError):
                json.loads(message.calls[0][1])
        else:
            assert message.content == text[:length]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        (
            "hermes",
            'Let me see. \n<tool_call>{"name": "a", "arguments": {}}</tool_call>\n'
            '<tool_call>{"arguments": {"x": [1, {"y": "}"}]}, "name": "b"}</tool_call> Done.',
            "Let me see. \nDone.",
            [("a", {}), ("b", {"x": [1, {"y": "}"}]})],
        ),
        ("hermes", "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
        ("hermes", '<tool_call>{"name": "a"}</tool_call>', "", [("a", {})]),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": {"x": "</tool_call> \\"<tool_call>"}}'
            "</tool_call>",
            "",
            [("a", {"x": '</tool_call> "<tool_call>'})],
        ),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": {"x": 1}</tool_call>',
            "",
            [("a", {"x": 1})],
        ),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>',
            "",
            [("a", {"x": 1})],
        ),
        ("hermes", '<tool_call>{"name": "a", "arguments": null}</tool_call>', "", [("a", {})]),
        (
            "hermes",
            '<tool_call>{"id": 7, "name": "a", "arguments": {}}\n{"name": "b", "arguments": {}}'
            "\n</tool_call>",
            "",
            [("a", {}), ("b", {})],
        ),
        (
            "hermes",
            '<tool_call><tool_call>{"name": "a", "arguments": {}}</tool_call>',
            "<tool_call>",
            [("a", {})],
        ),
        (
            "hermes",
            '<tool_call>{"name": "", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "", "arguments": {}}</tool_call>',
            [],
        ),
        (
            "hermes",
            '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
            [],
        ),
        ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ("llama3_json", '{"name": "Bob"}', '{"name": "Bob"}', []),
        (
            "llama3_json",
            '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}',
            "",
            [("a", {}), ("b", {})],
        ),
        (
            "llama3_json",
            'So: {"name": "a", "parameters": {}}',
            'So: {"name": "a", "parameters": {}}',
            [],
        ),
        (
            "mistral",
            '[TOOL_CALLS]a{"x": 1}[TOOL_CALLS]b{"y": "z"}',
            "",
            [("a", {"x": 1}), ("b", {"y": "z"})],
        ),
        ("mistral", 'Ok. [TOOL_CALLS]a[CALL_ID]123456789[ARGS]{"x": 1}', "Ok.", [("a", {"x": 1})]),
        ("mistral", "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": 1}}]',
            "",
            [("a", {}), ("b", {"x": 1})],
        ),
        (
            "pythonic",
            "[a(x=[1, -2.5, 1_000], y={'k': (True, None)}, z='it\\'s \\u00e9\"\\n'), b()]",
            "",
            [("a", {"x": [1, -2.5, 1000], "y": {"k": [True, None]}, "z": "it's é\"\n"}), ("b", {})],
        ),
        ("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
        ("pythonic", "[see(1)]", "[see(1)]", []),
        ("pythonic", "[a(x=1)] and more", "and more", [("a", {"x": 1})]),
        (
            "xlam",
            f"Sure.\n```json\n[{CALL}]\n```",
            "Sure.",
            PARIS,
        ),
        ("xlam", "```json\n[1]\n```", "```json\n[1]\n```", []),
    ],
)
def test_examples(
    name: str, text: str, content: str, calls: list[tuple[str, dict[str, object]]]
) -> None:
    message = read_by(name, text)
    assert (message.content, message.parsed) == (content, calls)


def test_what_is_no_constant_leaves_the_arguments_open() -> None:
    message = read_by("pythonic", "[a(x=1, y=open('f'))]")
    assert message.calls == [["a", '{"x": 1, "y": ']]
    assert message.content == "open('f'))]"


def test_values_of_qwen3_coder_follow_the_schema() -> None:
    text = (
        "<tool_call><function=weather><parameter=city>\n12\n\n</parameter><parameter=days>\nmany"
        '</parameter><parameter=units>None</parameter><parameter=place>{"a": [1]}</parameter>'
        '<parameter=other>a < b & "c"</parameter></function></tool_call>'
    )
    message = read_by("qwen3_coder", text, tools=WEATHER)
    assert message.parsed == [
        (
            "weather",
            {
                "city": "12\n",
                "days": "many",
                "units": None,
                "place": {"a": [1]},
                "other": 'a < b & "c"',
            },
        )
    ]


def test_one_call_at_most() -> None:
    text = 'A <tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call>' * 3 + " B"
    message = read_by("hermes", text, max_calls=1)
    assert message.parsed == [("a", {"x": 1})]
    assert message.content == "A A A B"


def test_what_was_demanded() -> None:
    text = '[{"name": "a", "parameters": {"x": 1}}, {"name": "b", "parameters": {}}]'
    assert read(text, MessageFormat(REQUIRED)).parsed == [("a", {"x": 1}), ("b", {})]
    assert read(' {"x": 1}', MessageFormat(named("a"))).parsed == [("a", {"x": 1})]
    assert read("", MessageFormat(named("a"))).calls == [["a", ""]]


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_ids_are_of_a_form_that_templates_take(name: str) -> None:
    new_id = TOOL_PARSERS[name].new_call_id
    ids = {new_id() for _ in range(100)}
    form = r"[A-Za-z0-9]{9}" if name == "mistral" else r"chatcmpl-tool-[0-9a-f]{32}"
    assert len(ids) == 100 and all(re.fullmatch(form, one) for one in ids)


@pytest.mark.parametrize(
    ("written", "passed_on"),
    [
        (r"\ud83d\ude00", r"\ud83d\ude00"),
        (r"\uD83D\uDE00\u00e9", r"\uD83D\uDE00\u00e9"),
        (r"\ud83d", r"\ufffd"),
        (r"\ude00\n", r"\ufffd\n"),
        (r"\ud83d\ud83d\ude00", r"\ufffd\ud83d\ude00"),
        (r"\ude00\ud83d", r"\ufffd\ufffd"),
        (r"\ud83d\\ude00", r"\ufffd\\ude00"),
        (r"\\ud83d", r"\\ud83d"),
        (r"\\\ud83d\"", r"\\\ufffd\""),
    ],
)
@pytest.mark.parametrize("more", ["", '"', '"}}</tool_call>'])
def test_half_of_a_pair_of_escapes_is_passed_on_as_no_character(
    written: str, passed_on: str, more: str
) -> None:
    """Also where the answer breaks off. Else the client could not send it back."""
    call = '<tool_call>{"name": "a", "arguments": {"x": "'
    message = read_by("hermes", f"{call}{written}{more}")
    ((_, arguments),) = message.calls
    assert arguments == f'{{"x": "{passed_on}{more.removesuffix("}</tool_call>")}'


def test_an_escape_that_breaks_off_stays_as_it_is() -> None:
    call = '<tool_call>{"name": "a", "arguments": {"x": "'
    whole = r"\ud83d\ude00"
    for length in range(1, len(whole)):
        ((_, arguments),) = read_by("hermes", call + whole[:length]).calls
        shown = whole[:length] if length < 6 else r"\ufffd" + whole[6:length]
        assert arguments == f'{{"x": "{shown}'
