"""What becomes of a body on its way to the engine: defaults, ids, unknown fields, refusals."""

import asyncio
import json
import logging
from collections.abc import Generator
from typing import Any, cast

import httpx
import pytest

from kunserve.cluster.api import ServingLimits
from kunserve.core.errors import MAX_QUEUED_REQS, MAX_QUEUED_TOKENS, Overloaded
from kunserve.core.request import SamplingParams
from kunserve.model.generation_config import SamplingDefaults
from kunserve.server.api.prompts import bad_words_of
from kunserve.server.api.sampling import SeedSource, resolve_sampling
from kunserve.server.api.schema import ChatBody, CompletionBody
from kunserve.server.api.text import TextCodec
from kunserve.server.http.limits import FrontLimits
from tests.unit.server.live_server import MODEL, LiveServer, live_server
from tests.unit.server.telemetry.test_metrics import labels, samples

COMPLETIONS = "/v1/completions"
PROMPT = {"model": MODEL, "prompt": "hello", "max_tokens": 4}


@pytest.fixture(scope="module")
def server() -> Generator[LiveServer, None, None]:
    with live_server() as one:
        yield one


@pytest.fixture
def client(server: LiveServer) -> Generator[httpx.Client, None, None]:
    server.renew_engine()
    with server.client() as one:
        yield one


def resolved(body: dict[str, Any], defaults: SamplingDefaults) -> SamplingParams:
    shape = CompletionBody(prompt="a", seed=1, **body)
    limits = ServingLimits(8, 16, 100)
    (one,) = resolve_sampling(shape, defaults, limits, [1], SeedSource(0))
    return one


def test_what_a_request_leaves_open_is_as_the_model_recommends() -> None:
    defaults = SamplingDefaults(0.6, 0.9, 20, 0.05, 1.1)
    taken = resolved({}, defaults)
    assert taken == SamplingParams(7, 0.6, 0.9, 20, 0.05, 1, repetition_penalty=1.1)
    asked = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0, "repetition_penalty": 1.0}
    assert resolved(asked, defaults) == SamplingParams(7, 0.0, 1.0, None, 0.0, 1)
    assert resolved({}, SamplingDefaults()) == SamplingParams(7, seed=1)


def test_a_token_that_is_allowed_twice_is_told_once() -> None:
    allowed = resolved({"allowed_token_ids": [3, 5, 3]}, SamplingDefaults()).allowed_token_ids
    assert allowed == (3, 5)


def test_each_completion_is_resolved_once_with_its_own_length() -> None:
    body = ChatBody(messages=[], n=2, seed=5, min_tokens=3)
    limits = ServingLimits(10, 16, 100)
    got = resolve_sampling(body, SamplingDefaults(), limits, [6, 1], SeedSource(0))
    assert [one.max_tokens for one in got] == [4, 4, 9, 9]
    assert got[0].seed == got[2].seed == 5 and got[1].seed == got[3].seed != 5


def test_what_goes_along_with_each_completion_is_bounded_over_all_of_them() -> None:
    """128 answers with a bias for each token of a vocabulary held up a group for seconds."""
    with live_server(limits=FrontLimits(max_entries=8)) as server, server.client() as client:

        def answer(**more: Any) -> httpx.Response:
            return client.post(COMPLETIONS, json={**PROMPT, **more})

        assert answer(n=2, logit_bias={"1": 1, "2": 1, "3": 1, "4": 1}).status_code == 200
        refused = answer(n=3, logit_bias={"1": 1, "2": 1, "3": 1})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "logit_bias"
        assert answer(n=3, allowed_token_ids=[1] * 43).status_code == 400
        assert answer(n=2, allowed_token_ids=[1] * 64).status_code == 200
        prompts = answer(prompt=["a"] * 9, bad_words=["b"])
        assert prompts.status_code == 400
        assert "9 completions" in prompts.json()["error"]["message"]


def test_a_bad_word_without_any_token_bans_nothing() -> None:
    class Codec:
        async def encode(self, texts: list[str], **more: Any) -> list[list[int]]:
            return [[ord(letter) for letter in text if letter in "ab"] for text in texts]

    body = CompletionBody.model_validate({"prompt": "a", "bad_words": ["ab", "?"]})
    found = asyncio.run(bad_words_of(cast(TextCodec, Codec()), body))
    assert [word for word in found if word] == [(97, 98)]


def test_the_models_length_is_a_chats_default(server: LiveServer, client: httpx.Client) -> None:
    server.call(lambda: setattr(server.front, "defaults", SamplingDefaults(max_new_tokens=11)))
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    lengths = []
    for body in (chat, chat | {"max_tokens": 20}):
        answer = client.post("/v1/chat/completions", json=body)
        lengths.append(answer.json()["usage"]["completion_tokens"])
    server.call(lambda: setattr(server.front, "defaults", SamplingDefaults()))
    assert lengths == [11, 20]


def test_a_clients_request_id_is_the_engines(server: LiveServer, client: httpx.Client) -> None:
    for _ in range(2):  # the same one twice
        named = client.post(COMPLETIONS, json=PROMPT | {"n": 2}, headers={"x-request-id": "tr-1"})
        assert named.json()["id"] == "cmpl-tr-1" and named.headers["x-request-id"] == "tr-1"
    engine_ids = [request.request_id for request in server.engine.submitted]
    assert len(set(engine_ids)) == 4
    assert all(one.startswith("cmpl-tr-1-") for one in engine_ids)
    odd = client.post(COMPLETIONS, json=PROMPT, headers={"x-request-id": "a\tb"})
    assert "\t" not in odd.json()["id"] and odd.json()["id"].startswith("cmpl-")


def chunks_of(client: httpx.Client, options: dict[str, bool]) -> list[dict[str, Any]]:
    body = PROMPT | {"stream": True, "stream_options": options}
    lines = client.post(COMPLETIONS, json=body).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_usage_in_each_chunk(client: httpx.Client) -> None:
    *chunks, last = chunks_of(client, {"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 4
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4


def test_usage_in_each_chunk_needs_usage_at_all(client: httpx.Client) -> None:
    chunks = chunks_of(client, {"continuous_usage_stats": True})
    assert chunks and all("usage" not in chunk for chunk in chunks)


def test_unknown_fields_are_told_once(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kunserve.server"):
        for _ in range(3):
            body = PROMPT | {"temprature": 0, "store": True, "e\n🎉" + "x" * 500: 1}
            assert client.post(COMPLETIONS, json=body).status_code == 200
        many = {f"unknown_{number}": 1 for number in range(500)}
        assert client.post(COMPLETIONS, json=PROMPT | many).status_code == 200
    told = [one.getMessage() for one in caplog.records if "unknown" in one.getMessage()]
    assert sum("temprature" in line for line in told) == 1
    assert not any("store" in line for line in told)
    assert len(told) == 100 and all(line.isascii() and len(line) < 200 for line in told)


def test_refusals_are_counted_by_reason(server: LiveServer, client: httpx.Client) -> None:
    for limit in (MAX_QUEUED_REQS, MAX_QUEUED_TOKENS):
        server.configure(refusal=lambda _request, limit=limit: Overloaded("full", limit=limit))
        assert client.post(COMPLETIONS, json=PROMPT | {"n": 3}).status_code == 503
    server.configure(refusal=lambda _request: None, admitting=False)
    for _ in range(2):
        assert client.post(COMPLETIONS, json=PROMPT).status_code == 503
    got = samples(client.get("/metrics").text)
    name = "vllm:admission_rejections_total"
    assert got[name, labels(reason="max_num_queued_reqs")] == 1
    assert got[name, labels(reason="max_num_queued_tokens")] == 1
    assert got[name, labels(reason="unavailable")] == 2


@pytest.mark.parametrize("city", ["\\ud800", "\\udc00 and more", "\\ud83d\\ud83d\\ude00"])
def test_past_calls_hold_whole_characters(client: httpx.Client, city: str) -> None:
    """JSON within a string of JSON, where the body's own parser does not look."""
    call = {"name": "weather", "arguments": f'{{"city": "{city}"}}'}
    said = {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
    chat = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}, said]}
    refused = client.post("/v1/chat/completions", json=chat)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert "`messages.1.tool_calls.0.function.arguments`" in message and "hex escape" in message
    call["arguments"] = '{"city": "\\ud83d\\ude00"}'
    assert client.post("/v1/chat/completions", json=chat).status_code == 200
