"""Calls of tools and reasoning, as the official client sees them."""

import json
from collections.abc import Generator
from typing import Any

import openai
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel

from kunserve.core.config import ChatConfig
from kunserve.core.request import ReasoningMarks
from kunserve.server.api import chat_format
from kunserve.server.api.text import TextCodec
from kunserve_extras.tool_parsers.tagged import tagged
from tests.conftest import wait_until
from tests.unit.server.live_server import MODEL, LiveServer, live_server
from tests.unit.server.tiny_tokenizer import ids, tiny_tokenizer

EOS = tiny_tokenizer().convert_tokens_to_ids("<|end|>")
CHAT = ChatConfig(enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Forecast.", "parameters": PARAMETERS},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS: Any = [WEATHER, CLOCK]
USER: Any = [{"role": "user", "content": "Rain in Paris?"}]
ARGUMENTS = '{"city": "Paris \\u2600", "days": 2}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CLOCK_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def shared() -> Generator[LiveServer, None, None]:
    with live_server(chat=CHAT) as server:
        yield server


def say(server: LiveServer, text: str) -> None:
    """The model's answer to whatever it is asked."""
    tokens = [*ids(text), EOS]
    server.configure(
        eos_token_id=EOS,
        max_model_len=2000,
        script=lambda request: tokens + [EOS] * (request.sampling.max_tokens - len(tokens)),
    )


def ask(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(
        **{"model": MODEL, "messages": USER, "tools": TOOLS, **options}
    )


def streamed(client: openai.OpenAI, **options: Any) -> dict[str, Any]:
    """The sum of a stream's deltas, by hand."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    finish = None
    for chunk in ask(client, stream=True, **options):
        (choice,) = chunk.choices
        delta = choice.delta
        message["content"] += delta.content or ""
        message["reasoning"] += getattr(delta, "reasoning", None) or ""
        for call in delta.tool_calls or []:
            if call.index == len(message["tool_calls"]):
                assert call.id and call.type == "function" and call.function.name
                message["tool_calls"].append([call.id, call.function.name, ""])
            else:
                assert call.id is None and call.function.name is None
            message["tool_calls"][call.index][2] += call.function.arguments
        assert finish is None
        finish = choice.finish_reason
    return message | {"finish_reason": finish}


def test_a_call(server: LiveServer, client: openai.OpenAI) -> None:
    say(server, f"<think>\nHm. \n</think>\n\nOne moment.\n{CALL}\n{CLOCK_CALL}")
    (choice,) = ask(client).choices
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert message.content == "One moment."
    assert message.reasoning == message.reasoning_content == "Hm."
    first, second = message.tool_calls
    assert (first.function.name, first.function.arguments) == ("weather", ARGUMENTS)
    assert (second.function.name, second.function.arguments) == ("clock", "{}")
    assert first.id != second.id and first.id.startswith("chatcmpl-tool-")


@pytest.mark.parametrize("per_tick", [1, 7, 1000])
def test_a_streamed_call_is_the_same(
    server: LiveServer, client: openai.OpenAI, per_tick: int
) -> None:
    say(server, f"<think>\nHm. \n</think>\n\nOne moment.\n{CALL}\n{CLOCK_CALL}")
    server.configure(per_tick=per_tick)
    message = streamed(client)
    assert message["content"] == "One moment."
    assert message["reasoning"] == "Hm."
    assert [call[1:] for call in message["tool_calls"]] == [
        ["weather", ARGUMENTS],
        ["clock", "{}"],
    ]
    assert message["finish_reason"] == "tool_calls"


def test_thoughts_come_before_a_form(
    server: LiveServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TextCodec, "token_id", lambda _, text: len(text))
    say(server, '<think>Hm.</think>\n[{"name": "clock", "parameters": {}}]')
    message = streamed(client, tool_choice="required")
    assert message["reasoning"] == "Hm." and message["content"] == ""
    assert [call[1:] for call in message["tool_calls"]] == [["clock", "{}"]]
    say(server, "<think>Hm.</think>{}")
    kind = {"type": "json_object"}
    (choice,) = ask(client, tools=openai.NOT_GIVEN, response_format=kind).choices
    assert (choice.message.reasoning, choice.message.content) == ("Hm.", "{}")
    sampling = server.engine.submitted[-1].sampling
    assert sampling.structured.after == ReasoningMarks(7, 8, is_open=False)


class Weather(BaseModel):
    city: str
    days: int


def test_the_streaming_helper(server: LiveServer, client: openai.OpenAI) -> None:
    say(server, f"{CALL}{CLOCK_CALL}")
    tools = [pydantic_function_tool(Weather, name="weather"), CLOCK]
    with client.chat.completions.stream(model=MODEL, messages=USER, tools=tools) as stream:
        done = [one for one in stream if one.type == "tool_calls.function.arguments.done"]
    (choice,) = stream.get_final_completion().choices
    assert [one.name for one in done] == ["weather", "clock"]
    assert done[0].parsed_arguments == Weather(city="Paris ☀", days=2)
    assert len(choice.message.tool_calls) == 2
    assert choice.message.tool_calls[0].function.parsed_arguments.days == 2


def test_the_result_goes_back(server: LiveServer, client: openai.OpenAI) -> None:
    say(server, CALL)
    message = ask(client).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "dry"}
    say(server, "It stays dry.")
    history = [*USER, message.model_dump(exclude_none=True), result]
    (choice,) = ask(client, messages=history).choices
    assert (choice.message.content, choice.finish_reason) == ("It stays dry.", "stop")
    assert choice.message.tool_calls is None
    prompt = tiny_tokenizer().decode(server.engine.submitted[-1].prompt_token_ids)
    assert "weather:Paris ☀<|end|>" in prompt and "<|start|>tool\ndry<|end|>" in prompt


def test_no_call_is_content(server: LiveServer, client: openai.OpenAI) -> None:
    say(server, CALL)
    (choice,) = ask(client, tool_choice="none").choices
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
    (choice,) = ask(client, tools=openai.omit).choices
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
    say(server, "<tool_call>broken</tool_call>")
    (choice,) = ask(client).choices
    assert choice.message.content == "<tool_call>broken</tool_call>"
    assert choice.finish_reason == "stop"


def test_one_call_at_most(server: LiveServer, client: openai.OpenAI) -> None:
    say(server, f"{CALL}{CLOCK_CALL}{CALL}")
    (choice,) = ask(client, parallel_tool_calls=False).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    assert len(streamed(client, parallel_tool_calls=False)["tool_calls"]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_required(server: LiveServer, client: openai.OpenAI, stream: bool) -> None:
    calls = [
        {"name": "weather", "parameters": json.loads(ARGUMENTS)},
        {"name": "clock", "parameters": {}},
    ]
    say(server, json.dumps(calls))
    if stream:
        message = streamed(client, tool_choice="required")
        got = [(name, json.loads(given)) for _, name, given in message["tool_calls"]]
        finish, content = message["finish_reason"], message["content"]
    else:
        (choice,) = ask(client, tool_choice="required").choices
        got = [
            (one.function.name, json.loads(one.function.arguments))
            for one in choice.message.tool_calls
        ]
        finish, content = choice.finish_reason, choice.message.content or ""
    assert got == [(one["name"], one["parameters"]) for one in calls]
    assert (finish, content) == ("tool_calls", "")
    structured = server.engine.submitted[-1].sampling.structured
    assert structured.kind == "json_schema"
    schema = json.loads(structured.text)
    assert (schema["type"], schema["minItems"], "maxItems" in schema) == ("array", 1, False)
    names = [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]]
    assert names == ["weather", "clock"]
    assert schema["items"]["anyOf"][0]["properties"]["parameters"] == PARAMETERS


@pytest.mark.parametrize("stream", [False, True])
def test_named(server: LiveServer, client: openai.OpenAI, stream: bool) -> None:
    say(server, ARGUMENTS)
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    if stream:
        message = streamed(client, tool_choice=choice)
        assert [call[1:] for call in message["tool_calls"]] == [["weather", ARGUMENTS]]
        assert message["finish_reason"] == "stop"
    else:
        (answer,) = ask(client, tool_choice=choice).choices
        (call,) = answer.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
        assert (answer.message.content, answer.finish_reason) == (None, "stop")
    structured = server.engine.submitted[-1].sampling.structured
    assert json.loads(structured.text) == PARAMETERS


def test_a_call_that_max_tokens_cuts(server: LiveServer, client: openai.OpenAI) -> None:
    text = CALL[: CALL.index(" \\u2600")]
    say(server, CALL)
    (choice,) = ask(client, max_tokens=len(ids(text))).choices
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris')


def test_stop_strings_logprobs_usage_and_several_choices(
    server: LiveServer, client: openai.OpenAI
) -> None:
    say(server, f"Look: {CALL} and then")
    answer = ask(client, n=2, stop=["and then"], logprobs=True)
    for choice in answer.choices:
        assert choice.message.content == "Look:"
        assert choice.message.tool_calls[0].function.arguments == ARGUMENTS
        assert choice.finish_reason == "tool_calls"
        assert "".join(one.token for one in choice.logprobs.content).startswith("Look: <tool_call>")
    chunks = list(
        ask(client, n=2, logprobs=True, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].usage.completion_tokens == 2 * (len(ids(f"Look: {CALL} and then")) + 1)
    tokens = [
        one.token
        for chunk in chunks[:-1]
        for choice in chunk.choices
        if choice.index == 1 and choice.logprobs
        for one in choice.logprobs.content
    ]
    assert "".join(tokens).startswith(f"Look: {CALL}")
    ids_of = {call.id for one in answer.choices for call in one.message.tool_calls}
    assert len(ids_of) == 2


def test_a_client_that_leaves_in_the_middle_of_a_call(
    server: LiveServer, client: openai.OpenAI
) -> None:
    say(server, CALL)
    server.configure(hold_after=len(ids(CALL)) - 10)
    stream = ask(client, stream=True)
    for chunk in stream:
        if chunk.choices[0].delta.tool_calls:
            break
    stream.close()
    wait_until(lambda: not server.engine.tasks)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"tools": openai.omit, "tool_choice": "required"}, "`tools` must be set"),
        ({"tool_choice": "any"}, "must be"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "not among"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "schema"),
        ({"extra_body": {"parallel_tool_calls": "no"}}, "parallel_tool_calls"),
    ],
)
def test_what_makes_no_sense(client: openai.OpenAI, options: Any, part: str) -> None:
    with pytest.raises(openai.BadRequestError, match=part):
        ask(client, **options)


def test_reasoning(server: LiveServer, client: openai.OpenAI) -> None:
    say(server, "<think>a <b>\n</think>\n\nYes")
    plain: dict[str, Any] = {"tools": openai.omit}
    message = streamed(client, **plain)
    assert (message["reasoning"], message["content"]) == ("a <b>", "Yes")
    hidden = ask(client, extra_body={"include_reasoning": False}, **plain).choices[0].message
    assert hidden.content == "Yes" and not hasattr(hidden, "reasoning")
    said = ask(client, **plain).choices[0].message.model_dump(exclude_none=True)
    ask(client, messages=[*USER, said, *USER], **plain)
    (choice,) = ask(client, max_tokens=len(ids("<think>a")), **plain).choices
    assert (choice.message.content, choice.message.reasoning) == (None, "a")
    assert choice.finish_reason == "length"


def test_marks_that_are_special_tokens_are_read_and_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the server's other flags of chats."""
    monkeypatch.setattr(chat_format, "extra_names", lambda _: ["starts"])
    monkeypatch.setattr(chat_format, "find_extra", lambda *_: tagged(("<|start|>",)))
    chat = ChatConfig(
        enable_auto_tool_choice=True,
        tool_call_parser="starts",
        exclude_tools_when_tool_choice_none=True,
        default_chat_template_kwargs='{"add_generation_prompt": false}',
    )
    with (
        live_server(chat=chat) as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60.0
        ) as client,
    ):
        say(server, f"Hm <|start|>{CALL[len('<tool_call>') : -len('</tool_call>')]}<|start|>")
        (choice,) = ask(client).choices
        assert choice.message.content == "Hm <|start|>"
        assert choice.message.tool_calls[0].function.arguments == ARGUMENTS
        (choice,) = ask(client, tool_choice="none").choices
        assert choice.message.content.startswith("Hm \n{")
        prompt = tiny_tokenizer().decode(server.engine.submitted[-1].prompt_token_ids)
        assert prompt == "<|start|>user\nRain in Paris?<|end|>\n<|start|>assistant\n"


@pytest.mark.parametrize("per_tick", [1, 1000])
def test_tokens_are_told_as_elsewhere(
    server: LiveServer, client: openai.OpenAI, per_tick: int
) -> None:
    say(server, f"One moment.\n{CALL}")
    server.configure(per_tick=per_tick)
    told = {"return_token_ids": True}
    (whole,) = ask(client, extra_body=told).choices
    assert whole.token_ids
    chunks = list(ask(client, stream=True, extra_body=told))
    told_ids = [getattr(chunk.choices[0], "token_ids", None) or [] for chunk in chunks]
    assert [one for part in told_ids for one in part] == whole.token_ids
    prompts = [one for chunk in chunks if (one := getattr(chunk, "prompt_token_ids", None))]
    assert prompts == [list(server.engine.submitted[-1].prompt_token_ids)]
