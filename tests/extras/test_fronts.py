"""Several HTTP fronts before one engine: real processes, one socket address, one account."""

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from kunserve.core.config import KunServeConfig, ModelConfig, ServerConfig
from kunserve.core.errors import Overloaded
from kunserve.model.generation_config import SamplingDefaults
from kunserve.server.start.serve import Drain
from kunserve.transport.children import child
from kunserve_extras.fronts import keeper
from kunserve_extras.fronts.keeper import FrontKeeper, listeners_of
from tests.conftest import wait_until
from tests.unit.server.echo_engine import EchoEngine


@dataclass
class Several:
    """A running keeper and the engine behind it."""

    engine: EchoEngine
    keeper: FrontKeeper
    port: int
    loop: asyncio.AbstractEventLoop
    drain: Drain

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=20.0)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"http://127.0.0.1:{self.port}{path}", json=body, timeout=20.0)

    def complete(self, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", **({"prompt": "hello", "max_tokens": 5} | body))


@contextlib.contextmanager
def several(num_fronts: int = 2) -> Generator[Several, None, None]:
    """Fronts over an ``EchoEngine``, whose vocabulary is the built-in model's."""
    engine = EchoEngine(max_model_len=512, vocab_size=49152)
    config = KunServeConfig(
        model=ModelConfig(),
        server=ServerConfig(
            api_server_count=num_fronts, shutdown_timeout_s=5.0, enable_admin=True, port=0
        ),
    )
    first = socket.create_server(("127.0.0.1", 0))
    port = first.getsockname()[1]
    listeners = listeners_of(first, num_fronts)
    made: dict[str, Any] = {}
    up = threading.Event()
    failed: list[BaseException] = []

    async def main() -> None:
        keeper = FrontKeeper(engine, "tiny", config, SamplingDefaults(), listeners)
        made.update(loop=asyncio.get_running_loop(), drain=Drain(), keeper=keeper)
        running = asyncio.create_task(keeper.run(made["drain"], catches_signals=False))
        ready = asyncio.create_task(keeper.until_up())
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
        up.set()
        await running
        await engine.close()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)
        finally:
            up.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert up.wait(100) and not failed, failed
    try:
        yield Several(engine, made["keeper"], port, made["loop"], made["drain"])
    finally:
        with contextlib.suppress(RuntimeError):
            made["loop"].call_soon_threadsafe(made["drain"].request)
        thread.join(30)
        for listener in listeners:
            listener.close()
    assert not thread.is_alive() and not failed, failed


def sample(text: str, name: str) -> float:
    """The sum of a metric's lines."""
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_a_listener_can_pause() -> None:
    """New connections go elsewhere then, and it hears again when it listens again."""
    first = socket.create_server(("127.0.0.1", 0))
    address = first.getsockname()
    with contextlib.ExitStack() as stack:
        one, other = [stack.enter_context(listener) for listener in listeners_of(first, 2)]
        one.listen(), other.listen()
        one.shutdown(socket.SHUT_RDWR)
        for _ in range(16):
            socket.create_connection(address, timeout=5.0).close()
            other.accept()[0].close()
        other.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5.0)
        one.listen()
        socket.create_connection(address, timeout=5.0).close()
        one.accept()[0].close()


def test_a_front_that_cannot_be_started_again_is_tried_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after the system has run out of memory. The other fronts go on meanwhile."""
    monkeypatch.setattr(child, "FIRST_PAUSE_S", 0.0)
    start, pair = subprocess.Popen, socket.socketpair
    pairs: list[tuple[socket.socket, socket.socket]] = []

    def recorded() -> tuple[socket.socket, socket.socket]:
        pairs.append(pair())
        return pairs[-1]

    def failing_once(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        if len(pairs) == 1:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return start(*words, **options)

    async def main(listener: socket.socket) -> None:
        config = KunServeConfig(model=ModelConfig(), server=ServerConfig(port=0))
        defaults, program = SamplingDefaults(), ("-c", "pass")
        fronts = FrontKeeper(EchoEngine(), "tiny", config, defaults, [listener], program)
        fronts._are_up.set()
        monkeypatch.setattr(keeper.socket, "socketpair", recorded)
        monkeypatch.setattr(child.subprocess, "Popen", failing_once)
        keeping = asyncio.create_task(fronts._keep(0, fronts._seats[0]))
        async with asyncio.timeout(20):
            while fronts.num_restarts < 2 and not keeping.done():
                await asyncio.sleep(0.01)
            fronts._leaving.set()
            await keeping

    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(main(listener))
    assert len(pairs) >= 2 and all(one.fileno() == -1 for one in pairs[0])
    assert "no more processes" in caplog.text


@pytest.mark.dear
def test_two_fronts_are_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers, streams, refusals, sums, state, admin, deaths of fronts, and the drain."""
    with several() as server:
        engine = server.engine
        texts = {server.complete().json()["choices"][0]["text"] for _ in range(12)}
        assert len(texts) == 1 and len(engine.submitted) == 12

        with httpx.stream(
            "POST",
            f"http://127.0.0.1:{server.port}/v1/completions",
            json={"prompt": "hello", "max_tokens": 5, "stream": True},
            timeout=20.0,
        ) as streamed:
            events = [line for line in streamed.iter_lines() if line]
        texts_of = [json.loads(line[6:])["choices"][0]["text"] for line in events[:-1]]
        assert events[-1] == "data: [DONE]" and "".join(texts_of) == 5 * "hello"

        # Whatever front answers, it tells of all.
        for _ in range(4):
            metrics = server.get("/metrics").text
            assert sample(metrics, "vllm:generation_tokens_total") == 13 * 5
            assert sample(metrics, "vllm:request_success_total") == 13
        assert server.get("/kunserve/timeline").json()["samples"]
        assert server.get("/health").json()["instances"] == 2

        engine.refusal = lambda _: Overloaded("full", 7)
        refused = server.complete()
        assert refused.status_code == 503 and refused.headers["retry-after"] == "7"
        engine.refusal = lambda _: None
        assert server.complete(model="other").status_code == 404
        engine.num_cached = 16
        assert server.post("/reset_prefix_cache").status_code == 200 and engine.num_cached == 0
        dropped = server.post("/kunserve/drop")
        assert dropped.status_code == 200 and dropped.json()["dropped_bytes_after"] > 0
        # Whoever was not asked to drop learns of it a little later.
        wait_until(lambda: server.get("/kunserve/state").json()["num_drops"] == 1)

        # A front dies in the middle of a request: the request is aborted, and a front comes back.
        engine.hold_after = 2
        body = {"prompt": "hello", "max_tokens": 5, "stream": True}
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        with (
            pytest.raises(httpx.HTTPError),
            httpx.stream("POST", url, json=body, timeout=20.0) as cut,
        ):
            lines = cut.iter_lines()
            next(lines)
            (pid,) = server.keeper.busy_pids
            os.kill(pid, signal.SIGKILL)
            for _ in lines:
                pass
        wait_until(lambda: not engine.tasks)
        assert engine.aborted
        engine.hold_after = None
        wait_until(lambda: server.keeper.num_restarts == 1)
        assert server.complete().status_code == 200
        total = sample(server.get("/metrics").text, "vllm:generation_tokens_total")
        assert total >= 13 * 5 + 5  # what the dead had told still counts

        # A front hangs and is ended, and nobody is there for long: the other one serves.
        monkeypatch.setattr(child, "FIRST_PAUSE_S", 1000.0)
        monkeypatch.setattr(child, "MAX_PAUSE_S", 1000.0)
        monkeypatch.setattr(keeper, "LEAVE_S", 0.2)
        seat = server.keeper._seats[0]
        seats = server.keeper._seats
        wait_until(lambda: all(one.desk is not None and one.desk.has_spoken for one in seats))
        assert seat.process is not None
        os.kill(seat.process.pid, signal.SIGSTOP)

        def is_ended() -> bool:
            if seat.desk is not None:
                seat.desk._heard_s = -1e6  # on a busy machine all are silent for seconds
            return server.keeper.num_restarts == 2

        wait_until(is_ended)
        monkeypatch.setattr(keeper, "LEAVE_S", 5.0)
        time.sleep(0.1)
        for _ in range(12):
            assert server.complete().status_code == 200
        assert len(server.keeper.pids) == 1
