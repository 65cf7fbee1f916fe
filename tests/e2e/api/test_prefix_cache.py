"""The prefix cache from outside: a real server of two instances, asked again and again."""

from collections.abc import Generator
from typing import Any

import httpx
import pytest

from kunserve_lab.bench.server_process import running_server

FLAGS = (
    "smollm2-135m", "--load-format", "dummy", "--num-instances", "2", "--instance-memory", "400MiB",
    "--enable-prompt-tokens-details", "--max-model-len", "512", "--enable-admin",
)  # fmt: skip
PROMPT = [100 + i for i in range(200)]


@pytest.fixture(scope="module")
def url() -> Generator[str, None, None]:
    with running_server(FLAGS) as server:
        yield server.url


def ask(url: str, prompt: list[int], **more: Any) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were cached."""
    body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 8, "temperature": 0} | more
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    return whole["choices"][0]["text"], whole["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow  # three processes that import torch
def test_who_asks_again_finds_the_beginning_and_gets_the_same_answer(url: str) -> None:
    text, num_cached = ask(url, PROMPT)
    assert num_cached == 0
    assert ask(url, PROMPT, cache_salt="mine") == (text, 0), "another salt shares nothing"
    for _ in range(4):
        assert ask(url, PROMPT) == (text, 192), "always the same one of two instances is asked"
    assert ask(url, PROMPT, cache_salt="mine") == (text, 192)
    _, num_cached = ask(url, [*PROMPT[:100], *range(300, 400)])
    assert num_cached == 96
    page = httpx.get(f"{url}/metrics", timeout=60.0).text
    hits = [line for line in page.splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
    assert sum(float(line.split()[-1]) for line in hits) == 5 * 192 + 96
    assert httpx.post(f"{url}/reset_prefix_cache", timeout=60.0).status_code == 200
    assert ask(url, PROMPT) == (text, 0)
