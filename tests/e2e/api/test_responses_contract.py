"""POST /v1/responses, as the official client sees it."""

from collections.abc import Generator
from typing import Any

import openai
import pydantic
import pytest

from kunserve.core.config import ChatConfig
from tests.conftest import wait_until
from tests.unit.server.live_server import MODEL, LiveServer, live_server, run_async
from tests.unit.server.tiny_tokenizer import ids, tiny_tokenizer

EOS = tiny_tokenizer().convert_tokens_to_ids("<|end|>")
OPENING = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
CLOSING = [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The forecast",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'


@pytest.fixture(scope="module")
def shared() -> Generator[LiveServer, None, None]:
    chat = ChatConfig(
        enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3"
    )
    with live_server(chat=chat) as server:
        yield server


def says(server: LiveServer, text: str) -> None:
    tokens = [*ids(text), EOS]
    server.configure(script=lambda request: tokens, eos_token_id=EOS)


def prompt_text(server: LiveServer) -> str:
    return tiny_tokenizer().decode(list(server.engine.submitted[-1].prompt_token_ids))


def test_a_response(server: LiveServer, client: openai.OpenAI) -> None:
    says(server, "It is Paris!")
    answer = client.responses.create(
        model=MODEL,
        instructions="Be brief",
        input="Where?",
        max_output_tokens=50,
        temperature=0.5,
        top_p=0.9,
        metadata={"a": "b"},
        store=False,
        extra_body={"seed": 5, "top_k": 3},
    )
    assert answer.output_text == "It is Paris!"
    assert answer.status == "completed" and answer.incomplete_details is None
    assert answer.id.startswith("resp_") and answer.output[0].id.startswith("msg_")
    assert answer.usage.input_tokens == len(server.engine.submitted[-1].prompt_token_ids)
    assert answer.usage.output_tokens == len(ids("It is Paris!")) + 1
    assert (answer.temperature, answer.top_p, answer.metadata) == (0.5, 0.9, {"a": "b"})
    begin = "<|start|>system\nBe brief<|end|>\n<|start|>user\nWhere?<|end|>\n"
    assert prompt_text(server) == begin + "<|start|>assistant\n"
    sampling = server.engine.submitted[-1].sampling
    assert (sampling.seed, sampling.top_k, sampling.max_tokens) == (5, 3, 50)


@pytest.mark.parametrize("per_tick", [1, 100])
def test_its_events(server: LiveServer, client: openai.OpenAI, per_tick: int) -> None:
    says(server, "one é two")
    server.configure(per_tick=per_tick)
    with client.responses.stream(model=MODEL, input="x", max_output_tokens=40) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:4] == OPENING and kinds[-4:] == [*CLOSING, "response.completed"]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == "one é two"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == "one é two" and final.usage.output_tokens > 3


def test_an_answer_that_is_cut(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="hello", max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(model=MODEL, input="x", max_output_tokens=2, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output[0].status == "incomplete"


def test_a_conversation(server: LiveServer, client: openai.OpenAI) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "rain", "arguments": '{"city": "X"}'}
    client.responses.create(
        model=MODEL,
        max_output_tokens=1,
        input=[
            {"role": "developer", "content": [{"type": "input_text", "text": "Be brief"}]},
            {"type": "message", "role": "user", "content": "Rain?"},
            {"type": "reasoning", "id": "r", "summary": []},
            {"role": "assistant", "content": "Look"},
            call,
            {"type": "function_call_output", "call_id": "c", "output": "dry"},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "No", "annotations": []}],
            },
            {"role": "user", "content": "And now?"},
        ],
    )
    turns = ["system\nBe brief", "user\nRain?", "assistant\nLookrain:X", "tool\ndry"]
    turns += ["assistant\nNo", "user\nAnd now?"]
    expected = "".join(f"<|start|>{turn}<|end|>\n" for turn in turns)
    assert prompt_text(server) == expected + "<|start|>assistant\n"


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(server: LiveServer, client: openai.OpenAI, stream: bool) -> None:
    says(server, "ab")
    answer: Any = client.responses.create(
        model=MODEL,
        input="x",
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        stream=stream,
    )
    if stream:
        events = list(answer)
        deltas = [e for e in events if e.type == "response.output_text.delta"]
        assert [one.token for e in deltas for one in e.logprobs] == ["a", "b", "<|end|>"]
        answer = events[-1].response
    told = answer.output[0].content[0].logprobs
    assert [one.token for one in told] == ["a", "b", "<|end|>"]
    assert all(len(one.top_logprobs) == 2 and one.logprob == -0.5 for one in told)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"store": True}, "keeps no responses"),
        ({"previous_response_id": "resp_1"}, "whole conversation"),
        ({"background": True}, "keeps no responses"),
        ({"tools": [{"type": "web_search"}]}, "only functions"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "among"),
        ({"extra_body": {"max_tool_calls": 2}}, "parallel_tool_calls"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"input": []}, "empty"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "maximum context length"),
        ({"extra_body": {"n": 2}}, "one answer"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
    ],
)
def test_what_it_does_not_do(
    server: LiveServer, client: openai.OpenAI, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        client.responses.create(**{"model": MODEL, "input": "x", **options})
    assert not server.engine.submitted


def test_a_long_conversation_may_be_cut(server: LiveServer, client: openai.OpenAI) -> None:
    client.responses.create(model=MODEL, input="zq " * 600, max_output_tokens=2, truncation="auto")
    assert len(server.engine.submitted[-1].prompt_token_ids) == 510


def test_failures(server: LiveServer, client: openai.OpenAI) -> None:
    server.configure(fail_after=1)
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model=MODEL, input="x")
    events = list(client.responses.create(model=MODEL, input="x", stream=True))
    assert events[-1].type == "response.failed"
    assert "engine failed" in events[-1].response.error.message
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="x")


def test_a_client_that_leaves_ends_its_request(server: LiveServer) -> None:
    server.configure(hold_after=2)

    async def main() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="any", timeout=60.0
        ) as client:
            stream = await client.responses.create(model=MODEL, input="x", stream=True)
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
            await stream.close()

    run_async(main)
    wait_until(lambda: not server.call(lambda: server.front.num_in_flight))
    assert server.engine.aborted


@pytest.mark.parametrize("path", ["embeddings", "rerank", "audio/transcriptions"])
def test_endpoints_of_others_say_why_they_are_not_there(server: LiveServer, path: str) -> None:
    with server.client() as http:
        answer = http.post(f"/v1/{path}", json={"model": MODEL, "input": "x"})
    assert answer.status_code == 404
    assert "not served here" in answer.json()["error"]["message"]


class Place(pydantic.BaseModel):
    city: str


def test_a_form(server: LiveServer, client: openai.OpenAI) -> None:
    says(server, '{"city": "Paris"}')
    answer = client.responses.parse(model=MODEL, input="Where?", text_format=Place)
    assert answer.output_parsed == Place(city="Paris")
    form = server.engine.submitted[-1].sampling.structured
    assert form is not None and form.kind == "json_schema" and "city" in form.text
    with client.responses.stream(model=MODEL, input="Where?", text_format=Place) as stream:
        assert stream.get_final_response().output_parsed == Place(city="Paris")
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.responses.create(model=MODEL, input="x", text={"format": {"type": "yaml"}})


@pytest.mark.parametrize("per_tick", [1, 100])
def test_calls_of_tools(server: LiveServer, client: openai.OpenAI, per_tick: int) -> None:
    says(server, f"<think>Two\n</think>\n\nLook. {CALL}{CALL}")
    server.configure(per_tick=per_tick)
    asked: Any = {"model": MODEL, "input": "Where?", "tools": [WEATHER]}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        thought, words, *calls = response.output
        assert thought.type == "reasoning" and thought.content[0].text == "Two"
        assert words.type == "message" and response.output_text == "Look."
        assert [call.name for call in calls] == ["weather"] * 2
        assert [call.arguments for call in calls] == ['{"city": "Köln"}'] * 2
        assert len({item.id for item in response.output}) == 4 and calls[0].call_id
        assert response.status == "completed" and response.tools[0].name == "weather"
    told = [event.delta for event in events if event.type.endswith("arguments.delta")]
    assert "".join(told) == '{"city": "Köln"}' * 2
    kinds = [event.type for event in events if event.type.startswith("response.output_item")]
    assert kinds == ["response.output_item.added", "response.output_item.done"] * 4
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"type": "function", "name": "weather"}, '{"city": "Bonn"}'),
        ("required", '[{"name": "weather", "parameters": {"city": "Bonn"}}]'),
    ],
)
def test_a_call_that_is_forced(
    server: LiveServer, client: openai.OpenAI, choice: Any, said: str
) -> None:
    says(server, said)
    answer = client.responses.create(
        model=MODEL, input="x", tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False
    )
    (call,) = answer.output
    assert call.type == "function_call" and call.name == "weather"
    assert server.engine.submitted[-1].sampling.structured is not None
    assert answer.tool_choice and answer.parallel_tool_calls is False


def test_thoughts(server: LiveServer, client: openai.OpenAI) -> None:
    says(server, "<think>Hm</think>No")
    answer = client.responses.create(model=MODEL, input="x", reasoning={"effort": "high"})
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output_text == "No"
    events = list(client.responses.create(model=MODEL, input="x", stream=True))
    thoughts = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "Hm"
