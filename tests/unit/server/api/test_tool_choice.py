"""``tool_choice``, and the form of an output that is the calls it demands."""

import json
from typing import Any

import pytest

from kunserve.core.config import ChatConfig
from kunserve.core.errors import ConfigError, InvalidRequest
from kunserve.core.request import ReasoningMarks, StructuredOutput
from kunserve.server.api.chat_format import ChatFormats
from kunserve.server.api.schema import ChatBody
from kunserve.server.api.text import TextCodec
from kunserve.server.api.tool_choice import ToolChoice, demanded_output, read_tool_choice
from tests.unit.server.tiny_tokenizer import tiny_tokenizer

TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/Node"}},
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
                "$ref": {"type": "string"},
            },
        }
    },
}
USER = [{"role": "user", "content": "x"}]


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def schema_of(tools: list[dict[str, Any]], choice: ToolChoice, most: int | None = None) -> Any:
    structured = demanded_output(tools, choice, most)
    assert structured is not None and structured.kind == "json_schema"
    return json.loads(structured.text)


@pytest.mark.parametrize(
    ("choice", "allows_auto", "expected"),
    [
        (None, True, ToolChoice("auto")),
        ("auto", True, ToolChoice("auto")),
        ("none", False, ToolChoice("none")),
        ("required", False, ToolChoice("required")),
        ({"type": "function", "function": {"name": "f"}}, False, ToolChoice("named", "f")),
    ],
)
def test_choices(choice: Any, allows_auto: bool, expected: ToolChoice) -> None:
    assert read_tool_choice([tool("f")], choice, allows_auto) == expected


@pytest.mark.parametrize(
    "choice", [3, "any", [], {}, {"function": "f"}, {"type": "x", "function": {"name": "f"}}]
)
def test_what_is_no_choice(choice: Any) -> None:
    with pytest.raises(InvalidRequest, match="`tool_choice` must be"):
        read_tool_choice([tool("f")], choice, True)


def test_without_tools_there_is_nothing_to_choose() -> None:
    for choice in (None, "none", "auto"):
        assert read_tool_choice([], choice, False) == ToolChoice("none")
    with pytest.raises(InvalidRequest, match="must be set"):
        read_tool_choice([], "required", True)


def test_nothing_is_demanded_of_a_free_choice() -> None:
    for mode in ("none", "auto"):
        assert demanded_output([tool("f")], ToolChoice(mode), None) is None


def test_references_point_to_where_the_schema_went() -> None:
    tools = [
        tool("a", parameters={"type": "object"}),
        tool("b", parameters=TREE),
        tool("c", parameters=TREE),
    ]
    schema = schema_of(tools, ToolChoice("required"), most=1)
    assert schema["maxItems"] == 1
    plain, *nested = (one["properties"]["parameters"] for one in schema["items"]["anyOf"])
    assert plain == {"type": "object"}
    assert nested == [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/1"}]
    for place, moved in schema["$defs"].items():
        reference = f"#/$defs/{place}/$defs/Node"
        assert moved["properties"]["root"] == {"$ref": reference}
        node = moved["$defs"]["Node"]["properties"]
        assert node["children"]["items"] == {"$ref": reference}
        assert node["$ref"] == {"type": "string"}


def test_a_named_tool_is_its_parameters() -> None:
    tools = [tool("a"), tool("b", parameters=TREE)]
    assert schema_of(tools, ToolChoice("named", "b")) == TREE
    assert schema_of(tools, ToolChoice("named", "a"))["properties"] == {}


def test_flags_that_need_each_other() -> None:
    with pytest.raises(ConfigError, match="requires --tool-call-parser"):
        ChatConfig(enable_auto_tool_choice=True)
    with pytest.raises(ConfigError, match="hermes"):
        ChatFormats(ChatConfig(tool_call_parser="qwen"))
    with pytest.raises(ConfigError, match="deepseek_r1"):
        ChatFormats(ChatConfig(reasoning_parser="x"))


@pytest.fixture
def codec() -> TextCodec:
    return TextCodec(tiny_tokenizer(), 1000, 1000)


@pytest.mark.parametrize(
    ("parser", "prompt", "is_open"),
    [
        ("qwen3", "assistant\n", None),
        ("qwen3", "assistant\n<think>\n", True),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<think> is what I wrote<|end|>assistant\n", None),
    ],
)
def test_the_prompt_says_whether_reasoning_is_open(
    codec: TextCodec, parser: str, prompt: str, is_open: bool | None
) -> None:
    formats = ChatFormats(ChatConfig(reasoning_parser=parser))
    body = ChatBody(messages=USER)
    token_ids = tiny_tokenizer().backend_tokenizer.encode(prompt).ids
    form = formats.of(codec, body, formats.demand(body), token_ids, None)
    assert form is not None and form.is_open is is_open


@pytest.mark.parametrize(
    ("said", "is_open"), [("<think>Hm", True), ("<think>Hm</think> So", False), ("So", None)]
)
def test_a_message_that_goes_on(codec: TextCodec, said: str, is_open: bool | None) -> None:
    formats = ChatFormats(ChatConfig(reasoning_parser="qwen3"))
    messages = [*USER, {"role": "assistant", "content": said}]
    body = ChatBody(messages=messages, continue_final_message=True)
    form = formats.of(codec, body, formats.demand(body), [], None)
    assert form is not None and form.is_open is is_open


@pytest.mark.parametrize(
    ("parser", "prompt", "is_open"),
    [
        ("qwen3", "assistant\n", False),
        ("qwen3", "assistant\n<think>\n", True),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", None),
        ("deepseek_r1", "assistant\n", True),
        (None, "assistant\n<think>\n", None),
    ],
)
def test_a_form_comes_behind_reasoning(
    codec: TextCodec, parser: str | None, prompt: str, is_open: bool | None
) -> None:
    formats = ChatFormats(ChatConfig(reasoning_parser=parser))
    body = ChatBody(messages=USER)
    token_ids = tiny_tokenizer().backend_tokenizer.encode(prompt).ids
    form = StructuredOutput("regex", "a+")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextCodec, "token_id", lambda _, text: len(text))
        found = formats.behind_reasoning(codec, body, token_ids, form)
    marks = None if is_open is None else ReasoningMarks(7, 8, is_open)
    assert found == StructuredOutput("regex", "a+", marks)
    reading = formats.of(codec, body, formats.demand(body), token_ids, found)
    assert (reading is None) == (is_open is None), "who may not think is not read for thoughts"
    same = formats.behind_reasoning(codec, body, token_ids, form)
    assert same == form, "this vocabulary has no tokens for the marks"


def test_answers_are_read_only_where_there_is_something_to_find(codec: TextCodec) -> None:
    formats = ChatFormats(ChatConfig(enable_auto_tool_choice=True, tool_call_parser="mistral"))
    plain = ChatBody(messages=USER)
    assert formats.of(codec, plain, formats.demand(plain), [], None) is None
    none = ChatBody(messages=USER, tools=[tool("f")], tool_choice="none")
    assert formats.of(codec, none, formats.demand(none), [], None) is None
    named = ChatBody(
        messages=USER,
        tools=[tool("f")],
        tool_choice={"type": "function", "function": {"name": "f"}},
    )
    form = formats.of(codec, named, formats.demand(named), [], None)
    assert form is not None and len(form.new_call_id()) == 9 and not form.calls_finish


@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice("named", "f")])
@pytest.mark.parametrize(
    "parameters",
    [{"description": "x" * 300_000}, {"enum": [1] * 140_000}, {"enum": ["ä"] * 60_000}],
)
def test_calls_are_demanded_of_no_more_than_a_form_may_be(
    choice: ToolChoice, parameters: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match="`tools` may have 262144 characters at most"):
        demanded_output([tool("f", parameters=parameters)], choice, None)
