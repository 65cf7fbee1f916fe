"""What docs/vllm-features.md promises and no other test shows: small endpoints, small fields."""

from collections.abc import Generator

import httpx
import pytest

from tests.unit.server.live_server import MODEL, LiveServer, live_server
from tests.unit.server.tiny_tokenizer import ids, tiny_tokenizer

EOS = tiny_tokenizer().convert_tokens_to_ids("<|end|>")


@pytest.fixture(scope="module")
def server() -> Generator[LiveServer, None, None]:
    with live_server() as one:
        yield one


@pytest.fixture
def client(server: LiveServer) -> Generator[httpx.Client, None, None]:
    server.renew_engine()
    with server.client() as one:
        yield one


def prompt_text(server: LiveServer) -> str:
    return tiny_tokenizer().decode(list(server.engine.submitted[-1].prompt_token_ids))


def test_tokens_and_back(client: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "hello é", "return_token_strs": True}
    told = client.post("/tokenize", json={**body, "add_special_tokens": False}).json()
    assert told["tokens"] == ids("hello é") and told["count"] == len(told["tokens"])
    assert len(told["token_strs"]) == told["count"] and told["max_model_len"] == 512
    back = client.post("/detokenize", json={"model": MODEL, "tokens": told["tokens"]}).json()
    assert back == {"prompt": "hello é"}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Well"}]
    chat = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    chat["tools"] = [{"type": "function", "function": {"name": "rain"}}]
    told = client.post("/tokenize", json={**chat, "chat_template_kwargs": {}}).json()
    text = client.post("/detokenize", json={"tokens": told["tokens"]}).json()["prompt"]
    assert text.startswith("<|start|>tools") and text.endswith("<|start|>assistant\nWell")


def test_small_ones(client: httpx.Client) -> None:
    assert client.get("/load").json() == {"server_load": 0}
    assert set(client.get("/version").json()) == {"version"}
    assert "vllm:num_requests_running" in client.get("/metrics").text


def test_special_tokens(server: LiveServer, client: httpx.Client) -> None:
    server.configure(script=lambda _: [*ids("ab"), EOS, EOS])
    body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
    shown = client.post("/v1/completions", json={**body, "skip_special_tokens": False}).json()
    hidden = client.post("/v1/completions", json={**body, "add_special_tokens": False}).json()
    assert shown["choices"][0]["text"] == "ab<|end|>"
    assert hidden["choices"][0]["text"] == "ab"


def test_the_template_is_told(server: LiveServer, client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "chat_template_kwargs": {"tone": 1}, "max_tokens": 1}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    for name in ("tokenize", "messages", "self"):
        reserved = {**body, "chat_template_kwargs": {name: True}}
        told = client.post("/v1/chat/completions", json=reserved).json()["error"]
        assert told["message"] == f"`chat_template_kwargs` may not set `{name}`."


def test_fields_without_effect(server: LiveServer, client: httpx.Client) -> None:
    fields = {"vllm_xargs": {"a": 1}, "return_mm_kwargs": False, "return_token_offsets": True}
    more = {"routed_experts_prompt_start": 3, "session_id": "a", "stream_interval": 4}
    body = {"prompt": "hello", "max_tokens": 2}
    plain = client.post("/v1/completions", json=body).json()["choices"]
    assert client.post("/v1/completions", json=body | fields | more).json()["choices"] == plain
