"""A few hundred hostile requests: none breaks the server, and none leaves anything behind."""

import asyncio
import os
from collections import Counter

import pytest

from benchmarks.faults.hostile_requests import hostile_requests
from benchmarks.faults.http_fuzz import fuzz, linger, open_files
from kunserve.core.config import ServerConfig
from kunserve.server.http.limits import FrontLimits
from tests.conftest import wait_until
from tests.unit.server.live_server import live_server

COUNT = 200
LIMITS = FrontLimits(header_timeout_s=10.0, body_timeout_s=10.0)


def test_the_same_seed_draws_the_same_requests() -> None:
    assert list(hostile_requests(3, 50)) == list(hostile_requests(3, 50))
    kinds = Counter(request.name for request in hostile_requests(3, 500))
    assert kinds["POST /v1/completions"] > 100 and len(kinds) > 30


@pytest.mark.parametrize("seed", [1, 2])
def test_hostile_requests_break_nothing(
    seed: int, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ServerConfig(enable_admin=True, shutdown_timeout_s=5.0)
    with live_server(server=settings, limits=LIMITS) as server:
        with server.client() as client:
            # The process that tries forms has files of its own.
            form = {"prompt": "hello", "max_tokens": 1, "structured_outputs": {"regex": "a"}}
            assert client.post("/v1/completions", json=form).status_code == 200
        wait_until(lambda: not server.front.num_in_flight)

        async def attack() -> None:
            slow = [asyncio.create_task(linger(server.port, number)) for number in range(5)]
            findings = await fuzz(server.port, seed, COUNT, num_workers=8, max_s=90.0)
            for task in slow:
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)
            assert findings.faults == {}, capsys.readouterr().err
            assert findings.statuses.total() == COUNT
            assert findings.statuses["200"] > 20 and findings.statuses["400"] > 100

        num_files = open_files(os.getpid())
        asyncio.run(attack())
        wait_until(lambda: not server.engine.tasks)
        wait_until(lambda: not server.front.num_in_flight)
        wait_until(lambda: not server.front.bodies.unfinished_bytes)
        wait_until(lambda: not server.front.codec.threads.held_chars)
        wait_until(lambda: open_files(os.getpid()) <= num_files)
        with server.client() as client:
            answer = client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4})
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
