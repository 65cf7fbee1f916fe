"""Pausing a server and ending its requests by vLLM's names."""

import asyncio
from collections.abc import Generator

import httpx
import pytest

from kunserve.core.config import ServerConfig
from kunserve_extras import pausing
from tests.unit.server.live_server import MODEL, LiveServer, live_server, run_async

ASK = {"model": MODEL, "prompt": "hello", "max_tokens": 9}


@pytest.fixture(scope="module")
def shared() -> Generator[LiveServer, None, None]:
    with live_server(server=ServerConfig(enable_admin=True, shutdown_timeout_s=5.0)) as server:
        yield server


@pytest.fixture
def server(shared: LiveServer) -> Generator[LiveServer, None, None]:
    shared.renew_engine()
    yield shared
    shared.front.is_paused = False


def post(server: LiveServer, path: str, **body: object) -> httpx.Response:
    with server.client() as http:
        return http.post(path, json=body)


async def ask(
    server: LiveServer, request_id: str, path: str = "completions", **more: object
) -> httpx.Response:
    async with httpx.AsyncClient(base_url=server.url, timeout=20.0, trust_env=False) as http:
        headers = {"x-request-id": request_id}
        return await http.post(f"/v1/{path}", json={**ASK, **more}, headers=headers)


async def until(server: LiveServer, num: int) -> None:
    """Wait until so many requests stand still after their first tokens."""
    async with asyncio.timeout(20):
        while server.front.num_in_flight != num or len(server.engine.submitted) < num:
            await asyncio.sleep(0.01)


def test_a_pause_ends_answers_and_lets_nobody_in(server: LiveServer) -> None:
    server.configure(hold_after=2)

    async def main() -> list[httpx.Response]:
        asked = [asyncio.create_task(ask(server, name)) for name in ("one", "two")]
        await until(server, 2)
        async with httpx.AsyncClient(base_url=server.url, timeout=20.0, trust_env=False) as http:
            assert (await http.post("/pause")).json() == {"status": "paused"}
            assert (await http.get("/is_paused")).json() == {"is_paused": True}
            assert (await http.get("/health/ready")).json()["status"] == "paused"
            refused = await http.post("/v1/completions", json=ASK)
            assert refused.status_code == 503 and "paused" in refused.text
            assert (await http.post("/resume")).json() == {"status": "resumed"}
        return await asyncio.gather(*asked)

    for answer in run_async(main):
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["finish_reason"] == "abort"
    assert len(server.engine.aborted) == 2
    server.configure(hold_after=None)
    assert post(server, "/v1/completions", **ASK).status_code == 200


def test_a_pause_ends_what_is_on_its_way_in(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that was admitted before the pause, and is started after it began."""
    server.configure(held=True)

    async def admitted(_request_id: object) -> None:
        while not server.front.is_paused:
            await asyncio.sleep(0.001)

    monkeypatch.setattr(server.engine, "admitted", admitted)
    monkeypatch.setattr(pausing, "WAIT_S", 20.0)

    async def main() -> httpx.Response:
        asked = asyncio.create_task(ask(server, "late"))
        await until(server, 1)
        async with httpx.AsyncClient(base_url=server.url, timeout=20.0, trust_env=False) as http:
            assert (await http.post("/pause")).json() == {"status": "paused"}
        return await asked

    assert run_async(main).json()["choices"][0]["finish_reason"] == "abort"


def test_a_pause_may_wait_for_the_answers(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.configure(held=True)

    async def main() -> httpx.Response:
        asked = asyncio.create_task(ask(server, "one"))
        await until(server, 1)
        async with httpx.AsyncClient(base_url=server.url, timeout=20.0, trust_env=False) as http:
            monkeypatch.setattr(pausing, "WAIT_S", 0.02)
            late = await http.post("/pause?mode=wait")
            assert late.status_code == 503 and "1 answers" in late.text
            monkeypatch.setattr(pausing, "WAIT_S", 20.0)
            pause = asyncio.create_task(http.post("/pause?mode=wait&clear_cache=false"))
            server.engine.held = False
            assert (await pause).json() == {"status": "paused"}
        return await asked

    assert run_async(main).json()["choices"][0]["finish_reason"] == "length"
    assert not server.engine.aborted


def test_requests_are_aborted_by_name(server: LiveServer) -> None:
    """An id that begins as another one's is not that one's."""
    server.configure(hold_after=2)

    async def main() -> list[httpx.Response]:
        names = ("job", "job-1", "chat", "talk", "told")
        chat = {"messages": [{"role": "user", "content": "x"}], "prompt": None}
        asked = [
            asyncio.create_task(ask(server, "job")),
            asyncio.create_task(ask(server, "job-1", n=2)),
            asyncio.create_task(ask(server, "chat", "chat/completions", **chat)),
            asyncio.create_task(ask(server, "talk", "messages", **chat)),
            asyncio.create_task(
                ask(server, "told", "responses", input="x", prompt=None, max_tokens=None)
            ),
        ]
        await until(server, len(names))
        async with httpx.AsyncClient(base_url=server.url, timeout=20.0, trust_env=False) as http:
            for ids, num in ((["job"], 1), (["chatcmpl-chat", "nobody"], 1), ([], 3), ([], 0)):
                said = await http.post("/abort_requests", json={"request_ids": ids})
                assert said.json() == {"status": "aborted", "aborted": num}
                async with asyncio.timeout(20):
                    while ids == ["job"] and not asked[0].done():
                        await asyncio.sleep(0.01)
        return await asyncio.gather(*asked)

    job, other, chat, talk, told = run_async(main)
    assert [one["finish_reason"] for one in other.json()["choices"]] == ["abort"] * 2
    assert job.json()["choices"][0]["finish_reason"] == "abort"
    assert chat.json()["choices"][0]["finish_reason"] == "abort"
    assert talk.json()["stop_reason"] == "pause_turn"
    assert told.json()["status"] == "failed" and told.json()["error"]["message"]


def test_only_operators_may() -> None:
    with live_server() as server, server.client() as http:
        for path in ("/pause", "/resume", "/abort_requests"):
            assert http.post(path, json={}).status_code == 403
        assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    with live_server(server=ServerConfig(enable_admin=True)) as server, server.client() as http:
        foreign = {"origin": "https://evil.example"}
        assert http.post("/pause", headers=foreign).status_code == 403
        assert not http.get("/is_paused").json()["is_paused"]
