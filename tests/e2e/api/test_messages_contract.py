"""POST /v1/messages, as the wire has it; ``tests/clients`` asks with the official client."""

import json
from collections.abc import Generator
from typing import Any

import httpx
import pytest

from kunserve.core.config import ChatConfig, ServerConfig
from kunserve.core.errors import Overloaded
from kunserve_extras.messages import answer as answers
from tests.conftest import wait_until
from tests.unit.server.live_server import MODEL, LiveServer, live_server
from tests.unit.server.tiny_tokenizer import ids, tiny_tokenizer

EOS = tiny_tokenizer().convert_tokens_to_ids("<|end|>")
USER = {"role": "user", "content": "Where?"}
WEATHER = {
    "name": "weather",
    "description": "The forecast",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
CHAT = ChatConfig(enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")


@pytest.fixture(scope="module")
def shared() -> Generator[LiveServer, None, None]:
    with live_server(
        chat=CHAT, server=ServerConfig(enable_prompt_tokens_details=True, shutdown_timeout_s=5.0)
    ) as server:
        yield server


def says(server: LiveServer, text: str) -> None:
    tokens = [*ids(text), EOS]
    server.configure(script=lambda request: tokens, eos_token_id=EOS)


def ask(server: LiveServer, path: str = "/v1/messages", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 200, "messages": [USER], **fields}
    with server.client() as http:
        return http.post(path, json={k: v for k, v in body.items() if v is not None})


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def prompt_text(server: LiveServer) -> str:
    return str(tiny_tokenizer().decode(list(server.engine.submitted[-1].prompt_token_ids)))


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream tells; what comes out of order fails."""
    message, is_open = events[0]["message"], False
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    for event in events[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
                is_open = True
            case "content_block_delta":
                assert is_open and event["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], dict(event["delta"])
                field = delta.pop("type").removesuffix("_delta").replace("input_json", "json")
                (told,) = delta.values()
                block[field] = block.get(field, "") + told
            case "content_block_stop":
                assert is_open and event["index"] == len(message["content"]) - 1
                is_open = False
            case "message_delta":
                assert not is_open
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case other:
                assert other == "ping"
    for block in message["content"]:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("json", None) or "{}")
    return dict(message)


def whole_or_streamed(server: LiveServer, stream: bool, **fields: Any) -> dict[str, Any]:
    answer = ask(server, stream=stream, **fields)
    assert answer.status_code == 200, answer.text
    return added_up(events_of(answer)) if stream else answer.json()


def test_a_message(server: LiveServer) -> None:
    says(server, "It is Paris!")
    server.configure(num_cached=4)
    answer = ask(
        server,
        system=[{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}],
        temperature=0.5,
        top_k=3,
        metadata={"user_id": "u"},
    ).json()
    num_prompt = len(server.engine.submitted[-1].prompt_token_ids)
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "It is Paris!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt - 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": len(ids("It is Paris!")) + 1,
        },
    }
    begin = "<|start|>system\nBe brief<|end|>\n<|start|>user\nWhere?<|end|>\n"
    assert prompt_text(server) == begin + "<|start|>assistant\n"
    sampling = server.engine.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.5, 3, 200)


@pytest.mark.parametrize("per_tick", [1, 100])
def test_its_events(server: LiveServer, per_tick: int) -> None:
    said = f"<think>Two\n</think>\n\nLook. {CALL}{CALL}"
    says(server, said)
    server.configure(per_tick=per_tick)
    streamed = whole_or_streamed(server, True, tools=[WEATHER])
    whole = whole_or_streamed(server, False, tools=[WEATHER])
    for message in (streamed, whole):
        message["id"] = None
        for block in message["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id")
    assert streamed == whole
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][0]["thinking"] == "Two" and whole["content"][1]["text"] == "Look."
    assert whole["content"][2]["input"] == {"city": "Köln"}
    assert whole["stop_reason"] == "tool_use"


def test_the_order_of_events(server: LiveServer) -> None:
    says(server, "one")
    server.configure(per_tick=100)
    kinds = [event["type"] for event in events_of(ask(server, stream=True))]
    expected = "message_start ping content_block_start content_block_delta content_block_stop "
    assert kinds == (expected + "message_delta message_stop").split()


def test_a_silent_stream_pings(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PING_S", 0.01)
    server.configure(held=True)
    body = {"model": MODEL, "max_tokens": 4, "messages": [USER], "stream": True}
    with (
        server.client() as http,
        http.stream("POST", "/v1/messages", json=body) as answer,
    ):
        told = ""
        for text in answer.iter_text():
            told += text
            if told.count("event: ping") > 2:
                server.configure(held=False)
    assert told.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason", "matched"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"max_tokens": 40_000}, "model_context_window_exceeded", None),
        ({"stop_sequences": ["wor", "x"]}, "stop_sequence", "wor"),
    ],
)
def test_stop_reasons(
    server: LiveServer, stream: bool, fields: dict[str, Any], reason: str, matched: str | None
) -> None:
    tokens = ids("hello world, ") * 200
    server.configure(script=lambda request: tokens)
    message = whole_or_streamed(server, stream, **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, matched)
    if matched:
        assert message["content"] == [{"type": "text", "text": "hello "}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "said", "inputs"),
    [
        ({"type": "tool", "name": "weather"}, '{"city": "Bonn"}', [{"city": "Bonn"}]),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            '[{"name": "weather", "parameters": {"city": "Bonn"}}]',
            [{"city": "Bonn"}],
        ),
        ({"type": "none"}, CALL, []),
    ],
)
def test_tool_choice(
    server: LiveServer, stream: bool, choice: dict[str, Any], said: str, inputs: list[Any]
) -> None:
    says(server, said)
    message = whole_or_streamed(server, stream, tools=[WEATHER], tool_choice=choice)
    blocks = message["content"]
    assert [one["input"] for one in blocks if one["type"] == "tool_use"] == inputs
    assert message["stop_reason"] == ("tool_use" if inputs else "end_turn")
    form = server.engine.submitted[-1].sampling.structured
    assert (form is None) == (choice["type"] == "none")


def test_a_call_that_is_cut_has_what_there_is(server: LiveServer) -> None:
    says(server, CALL)
    num_tokens = len(ids(CALL[: CALL.index("ln")]))
    message = whole_or_streamed(server, False, tools=[WEATHER], max_tokens=num_tokens)
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][0]["type"] == "tool_use"


def test_a_conversation(server: LiveServer) -> None:
    image = [{"type": "text", "text": "dry"}]
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Rain?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "unsigned"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Look"},
                {"type": "tool_use", "id": "t", "name": "rain", "input": {"city": "X"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": image},
                {"type": "tool_result", "tool_use_id": "t", "is_error": True},
                {"type": "text", "text": "And now?"},
            ],
        },
        {"role": "system", "content": "Quick"},
    ]
    system = "x-anthropic-billing-header: cc_version=1; cch=ab12;\nBe brief"
    ask(server, messages=turns, system=system, max_tokens=1)
    told = ["system\nBe brief", "user\nRain?", "assistant\nLookrain:X", "tool\ndry", "tool\n"]
    told += ["user\nAnd now?", "system\nQuick"]
    expected = "".join(f"<|start|>{turn}<|end|>\n" for turn in told)
    assert prompt_text(server) == expected + "<|start|>assistant\n"


def test_an_answer_that_goes_on(server: LiveServer) -> None:
    says(server, "B")
    begun = [USER, {"role": "assistant", "content": "It is ("}]
    message = whole_or_streamed(server, False, messages=begun)
    assert prompt_text(server).endswith("assistant\nIt is (")
    assert message["content"] == [{"type": "text", "text": "B"}]


def test_thinking_may_be_off(server: LiveServer) -> None:
    says(server, "<think>Hm</think>No")
    on = whole_or_streamed(server, False, thinking={"type": "enabled", "budget_tokens": 1024})
    off = whole_or_streamed(server, False, thinking={"type": "disabled"})
    assert [block["type"] for block in on["content"]] == ["thinking", "text"]
    assert off["content"] == [{"type": "text", "text": "No"}]


def test_a_form(server: LiveServer) -> None:
    says(server, '{"city": "Paris"}')
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    message = whole_or_streamed(server, False, output_config=config)
    assert json.loads(message["content"][0]["text"]) == {"city": "Paris"}
    form = server.engine.submitted[-1].sampling.structured
    assert form is not None and json.loads(form.text) == schema


def test_tokens_are_counted(server: LiveServer) -> None:
    fields = {"system": "Be brief", "tools": [WEATHER]}
    counted = ask(server, "/v1/messages/count_tokens", max_tokens=None, **fields)
    ask(server, max_tokens=1, **fields)
    assert counted.json() == {"input_tokens": len(server.engine.submitted[-1].prompt_token_ids)}
    assert len(server.engine.submitted) == 1


@pytest.mark.parametrize(
    ("fields", "status", "kind", "says"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "`max_tokens` is required"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "empty"),
        ({"messages": [{"role": "judge", "content": "x"}]}, 400, "invalid_request_error", "role"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "invalid_request_error", "content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
            "invalid_request_error",
            "messages.0.content.0`: a block 'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            400,
            "invalid_request_error",
            "tool_use_id",
        ),
        ({"messages": [{"role": "user", "content": "zq " * 900}]}, 400, None, "context length"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, 400, None, "web_search"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, 400, None, "among"),
        ({"mcp_servers": [{"url": "x"}]}, 400, None, "mcp_servers"),
        ({"use_beam_search": True}, 400, None, "use_beam_search"),
        ({"model": "claude"}, 404, "not_found_error", "does not exist"),
    ],
)
def test_errors(
    server: LiveServer, fields: dict[str, Any], status: int, kind: str | None, says: str
) -> None:
    answer = ask(server, **fields)
    told = answer.json()
    assert answer.status_code == status and told["type"] == "error"
    assert set(told["error"]) == {"type", "message"} and says in told["error"]["message"]
    assert told["error"]["type"] == (kind or "invalid_request_error")
    assert not server.engine.submitted


def test_failures(server: LiveServer) -> None:
    server.configure(fail_after=1)
    answer = ask(server)
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "api_error"
    events = events_of(ask(server, stream=True))
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
    server.configure(refusal=lambda _: Overloaded("The queue is full."))
    answer = ask(server, stream=True)
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert answer.json()["error"]["type"] == "overloaded_error"


def test_a_client_that_leaves_ends_its_request(server: LiveServer) -> None:
    server.configure(hold_after=2)
    body = {"model": MODEL, "max_tokens": 9, "messages": [USER], "stream": True}
    with server.client() as http, http.stream("POST", "/v1/messages", json=body) as answer:
        next(answer.iter_text())
    wait_until(lambda: not server.call(lambda: server.front.num_in_flight))
    assert server.engine.aborted


def test_the_key_in_anthropics_header() -> None:
    with live_server(server=ServerConfig(api_key="secret")) as server, server.client() as http:
        body = {"model": MODEL, "max_tokens": 1, "messages": [USER]}
        for headers, status in (
            ({}, 401),
            ({"x-api-key": "guessed"}, 401),
            ({"x-api-key": "secret"}, 200),
            ({"authorization": "Bearer secret"}, 200),
        ):
            answer = http.post("/v1/messages", json=body, headers=headers)
            assert answer.status_code == status
            if status == 401:
                assert answer.json()["error"]["type"] == "authentication_error"
        assert http.get("/v1/messages", headers={"x-api-key": "secret"}).json()["type"] == "error"
