"""What the front tells of the prefix cache, and what clients may say about it."""

import json
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kunserve.core.config import ServerConfig
from kunserve.core.load import LeaderTotals
from kunserve.server.telemetry.cluster_metrics import ClusterMetrics
from kunserve.server.telemetry.metrics import FrontMetrics
from kunserve.server.telemetry.stats_log import StatsLog
from tests.unit.server.echo_engine import EchoEngine, idle_load
from tests.unit.server.live_server import MODEL, LiveServer, live_server
from tests.unit.server.telemetry.test_metrics import labels, samples, scrape

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
MESSAGES = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def telling() -> Generator[LiveServer, None, None]:
    """A server that tells of cached tokens."""
    with live_server(server=ServerConfig(enable_prompt_tokens_details=True)) as one:
        yield one


@pytest.fixture
def client(telling: LiveServer) -> Generator[httpx.Client, None, None]:
    telling.renew_engine()
    telling.configure(num_cached=3)
    with telling.client() as one:
        yield one


def last_usage(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    lines = client.post(path, json=asked).text.split("\n\n")
    return json.loads(lines[-3].removeprefix("data: "))["usage"]


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
def test_answers_and_streams_tell_of_cached_tokens(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    whole = client.post(path, json=body).json()["usage"]
    assert whole["prompt_tokens_details"] == {"cached_tokens": 3}
    assert last_usage(client, path, body) == whole


@pytest.mark.parametrize("streams", [False, True])
def test_responses_tell_of_cached_tokens(client: httpx.Client, streams: bool) -> None:
    asked = {"model": MODEL, "input": "hi", "stream": streams}
    answer = client.post("/v1/responses", json=asked)
    if streams:
        last = answer.text.split("\n\n")[-2].partition("data: ")[2]
        usage = json.loads(last)["response"]["usage"]
    else:
        usage = answer.json()["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 3


def test_each_prompt_counts_once(client: httpx.Client) -> None:
    body = PROMPT | {"prompt": ["hello", "there"], "n": 2}
    usage = client.post(COMPLETIONS, json=body).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 6}


def test_nothing_cached_is_told_too(telling: LiveServer, client: httpx.Client) -> None:
    telling.configure(num_cached=0)
    usage = client.post(COMPLETIONS, json=PROMPT).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_a_salt_comes_to_the_engine(telling: LiveServer, client: httpx.Client) -> None:
    for salt in (None, "tenant-7"):
        assert client.post(CHAT, json=MESSAGES | {"cache_salt": salt}).status_code == 200
    assert [one.cache_salt for one in telling.engine.submitted] == ["", "tenant-7"]


@pytest.mark.parametrize("salt", ["", "x" * 129, "a/b", "a@b", "a\\b", "a\0b", 7, ["x"]])
def test_salts_that_vllm_refuses_are_refused(client: httpx.Client, salt: object) -> None:
    answer = client.post(COMPLETIONS, json=PROMPT | {"cache_salt": salt})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "cache_salt"


def test_without_the_flag_usage_is_as_before() -> None:
    engine = EchoEngine(num_cached=3)
    with live_server(engine) as server, server.client() as client:
        assert "prompt_tokens_details" not in client.post(COMPLETIONS, json=PROMPT).json()["usage"]
        page = samples(client.get("/metrics").text)
    everywhere = labels(engine="all")
    assert page["vllm:prompt_tokens_cached_total", everywhere] == 3
    computed = page["vllm:request_prefill_kv_computed_tokens_sum", everywhere]
    assert computed == page["vllm:request_prompt_tokens_sum", everywhere] - 3


def with_hits() -> EchoEngine:
    """Instance 1 has looked for 400 tokens and found 300; its cache holds 12 blocks."""
    engine = EchoEngine()
    first, second = engine.snapshot.instances
    second = replace(second, totals=LeaderTotals(prefix_queried_tokens=400, prefix_hit_tokens=300))
    loads = (idle_load(0), replace(idle_load(1), cached_blocks=12))
    engine.snapshot = replace(engine.snapshot, instances=(first, second), loads=loads)
    return engine


def test_hits_and_queries_are_counted_per_instance() -> None:
    engine = with_hits()
    metrics = FrontMetrics(engine, MODEL)
    page = scrape(metrics)
    assert page["vllm:prefix_cache_queries_total", labels(engine="1")] == 400
    assert page["vllm:prefix_cache_hits_total", labels(engine="1")] == 300
    assert page["vllm:prefix_cache_hits_total", labels(engine="0")] == 0
    assert page["kunserve:prefix_cached_blocks", labels(engine="1")] == 12


def test_the_stats_line_has_the_hit_rate() -> None:
    engine = EchoEngine()
    log = StatsLog(ClusterMetrics(engine, MODEL))
    log.lines(0.0)
    engine.snapshot = with_hits().snapshot
    (line,) = log.lines(10.0)
    assert "Prefix cache hit rate: 75.0%" in line
