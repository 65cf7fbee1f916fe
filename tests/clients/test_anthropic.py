"""Anthropic's own client."""

from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic")

CALLS = (
    'Let me look. <tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": 2}}</tool_call>'
)
THOUGHT = "Two cities.\n</think>\n\n"
WEATHER = {
    "name": "weather",
    "description": "The forecast for a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}


@pytest.fixture
def client(url: str) -> Any:
    return anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="any", max_retries=0)


def asked(said: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"SAY {said}"}]
    return {"model": "tiny", "max_tokens": 1000, "messages": messages, **options}


def check(message: Any) -> None:
    """The answer is thoughts, words and two calls."""
    thought, words, *calls = message.content
    assert (thought.type, thought.thinking) == ("thinking", "Two cities.")
    assert (words.type, words.text) == ("text", "Let me look.")
    assert [call.type for call in calls] == ["tool_use"] * 2 and calls[0].id != calls[1].id
    assert [call.input for call in calls] == [{"city": "Köln"}, {"city": "Paris", "days": 2}]
    assert message.stop_reason == "tool_use" and message.role == "assistant"
    assert message.usage.input_tokens > 20 and message.usage.output_tokens > 20


def test_a_message_and_what_follows_a_call(client: Any) -> None:
    question = asked(THOUGHT + CALLS, tools=[WEATHER], system="Be brief")
    message = client.messages.create(**question)
    check(message)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": f"dry in {block.input['city']}"}
        for block in message.content
        if block.type == "tool_use"
    ]
    turns = [
        *question["messages"],
        message.to_param(),
        {"role": "user", "content": results},
    ]
    last = client.messages.create(**{**question, "messages": turns})
    assert last.content[-1].text == "It says dry in Paris." and last.stop_reason == "end_turn"


def test_a_stream_adds_up(client: Any) -> None:
    with client.messages.stream(**asked(THOUGHT + CALLS, tools=[WEATHER])) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    check(message)
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert {"thinking", "text", "input_json"} <= set(kinds)


def test_a_stop_sequence(client: Any) -> None:
    message = client.messages.create(**asked("</think>one two three", stop_sequences=["three"]))
    assert message.content[0].text == "one two "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "three")


def test_the_tokens_of_a_question(client: Any) -> None:
    question = asked("</think>x", tools=[WEATHER])
    message = client.messages.create(**question)
    del question["max_tokens"]
    counted = client.messages.count_tokens(**question)
    assert counted.input_tokens == message.usage.input_tokens


def test_errors_have_their_classes(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**asked("x"), "model": "claude"})
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="image"):
        image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
        client.messages.create(**{**asked("x"), "messages": [{"role": "user", "content": [image]}]})
