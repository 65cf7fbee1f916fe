"""CPU microseconds that the HTTP front spends per streamed token, and per request.

    python -m benchmarks.serving.front_overhead [--streams 1 8 32 128]

An engine without a model hands one token to every stream at each tick; clients live in another
process. What is counted is the CPU time of the server's thread, less what the same engine costs
when nobody listens.
"""

import argparse
import asyncio
import json
import logging
import multiprocessing
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Any

import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.report import Report
from kunserve.cluster.api import Deliver, ServingLimits, Vitals
from kunserve.core.config import KunServeConfig
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.request import FinishReason, Request, SamplingParams, TokenLogprobs
from kunserve.core.snapshots import ClusterState
from kunserve.core.tokens import TokenIds
from kunserve.server.start.app import create_app
from kunserve.server.start.serve import Drain, serve

NUM_TOKENS = 200
EMPTY = ClusterState(0.0, (), (), (), (), 0, 0)


class PulseEngine:
    """Every live request gets one token per pulse."""

    def __init__(self, pulse_s: float) -> None:
        self._pulse_s = pulse_s
        self._live: dict[RequestId, tuple[Request, Deliver, int]] = {}

    @property
    def limits(self) -> ServingLimits:
        """Room enough."""
        return ServingLimits(1 << 20, 16, 256)

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Take a request."""
        self._live[request.request_id] = (request, deliver, 0)

    async def admitted(self, request_id: RequestId) -> None:
        """It was."""

    def abort(self, request_id: RequestId) -> None:
        """Forget a request."""
        self._live.pop(request_id, None)

    async def wait_for(self, num_requests: int) -> None:
        """Return once that many requests are here."""
        while len(self._live) < num_requests:
            await asyncio.sleep(0.001)

    async def pulse(self) -> None:
        """Serve what is here to the end."""
        while self._live:
            for request, deliver, position in list(self._live.values()):
                self._step(request, deliver, position)
            await asyncio.sleep(self._pulse_s)

    def _step(self, request: Request, deliver: Deliver, position: int) -> None:
        sampling = request.sampling
        last = position + 1 == sampling.max_tokens
        logprobs = None
        if sampling.num_logprobs is not None:
            top = tuple((one, -1.0 - one) for one in range(sampling.num_logprobs))
            logprobs = TokenLogprobs(-1.0, 1, top)
        if last:
            del self._live[request.request_id]
        else:
            self._live[request.request_id] = (request, deliver, position + 1)
        reason = FinishReason.LENGTH if last else None
        token_id = 65 + position % 26
        deliver(TokenOutput(request.request_id, position, token_id, logprobs, reason))

    def state(self) -> ClusterState:
        """Nothing to see."""
        return EMPTY

    def is_healthy(self) -> bool:
        """Always."""
        return True

    def is_progressing(self) -> bool:
        """Always."""
        return True

    def vitals(self) -> Vitals:
        """Whole."""
        return Vitals(num_instances=1, num_missing=0, num_errors=0)

    def num_unfinished(self) -> int:
        """Live requests."""
        return len(self._live)

    def stop_admission(self) -> None:
        """Nothing to stop."""

    async def drop(self, num_bytes: int | None) -> str:
        """Not here."""
        raise NotImplementedError

    async def restore(self) -> str:
        """Not here."""
        raise NotImplementedError

    def set_paused(self, paused: bool) -> None:
        """Not here."""
        raise NotImplementedError

    async def scale(self, num_instances: int) -> str:
        """Not here."""
        raise NotImplementedError

    async def reset_prefix_cache(self) -> None:
        """Not here."""
        raise NotImplementedError

    async def kill(self, instance_id: InstanceId) -> None:
        """Not here."""
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing to release."""


class ByteTokenizer:
    """256 tokens, one per byte."""

    chat_template: Any = "unused"

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {char: rank for rank, char in enumerate(alphabet)}
        self._tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self._tokenizer

    def apply_chat_template(self, conversation: Any, **_options: Any) -> str:
        """The messages' text."""
        return "".join(message["content"] for message in conversation)


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    name: str
    path: str
    body: dict[str, Any]


COMPLETION = {"prompt": "hello", "max_tokens": NUM_TOKENS, "stream": True}
CASES = (
    Case("completions", "/v1/completions", COMPLETION),
    Case(
        "chat",
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": NUM_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    Case(
        "completions, 3 stop strings", "/v1/completions", COMPLETION | {"stop": ["xx", "ABD", "?"]}
    ),
    Case("completions, logprobs=5", "/v1/completions", COMPLETION | {"logprobs": 5}),
    Case("completions, not streamed", "/v1/completions", COMPLETION | {"stream": False}),
)


def read_all(port: int, num_streams: int, path: str, body: dict[str, Any]) -> None:
    """The client process: open the streams, read them to the end."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}"
    selector = selectors.DefaultSelector()
    for _ in range(num_streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + b"\r\n\r\n" + content)
        selector.register(connection, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            if not key.fileobj.recv(65536):  # type: ignore[union-attr]
                selector.unregister(key.fileobj)


async def engine_alone(num_streams: int, pulse_s: float) -> float:
    """CPU seconds of the engine when its tokens go nowhere."""
    engine = PulseEngine(pulse_s)
    sampling = SamplingParams(max_tokens=NUM_TOKENS)
    for number in range(num_streams):
        engine.submit(
            Request(RequestId(str(number)), TokenIds((1,)), sampling, 0.0), lambda output: None
        )
    started_s = time.thread_time()
    await engine.pulse()
    return time.thread_time() - started_s


async def measure(case: Case, num_streams: int, pulse_s: float) -> tuple[float, float]:
    """The server thread's CPU microseconds per token, and per request before its first token."""
    engine = PulseEngine(pulse_s)
    config = KunServeConfig()
    app = create_app(engine, ByteTokenizer(), "bench", config)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    drain = Drain()
    serving = asyncio.create_task(serve(app, config, [listener], drain))
    context = multiprocessing.get_context("spawn")
    client = context.Process(target=read_all, args=(port, num_streams, case.path, case.body))
    client.start()
    await engine.wait_for(1)
    arriving_s = time.thread_time()
    await engine.wait_for(num_streams)
    started_s = time.thread_time()
    await engine.pulse()
    while app.state.front.num_in_flight:
        await asyncio.sleep(0.001)
    ended_s = time.thread_time()
    await asyncio.to_thread(client.join)
    drain.request()
    await serving
    alone_s = await engine_alone(num_streams, pulse_s)
    per_token_s = (ended_s - started_s - alone_s) / (num_streams * NUM_TOKENS)
    per_request_s = (started_s - arriving_s) / max(1, num_streams - 1)
    return per_token_s * 1e6, per_request_s * 1e6


def main() -> None:
    """Every kind of request at every number of streams."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--pulse-ms", type=float, default=2.0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with Report("front_overhead", tokens_per_request=NUM_TOKENS) as report:
        for case in CASES:
            for num_streams in options.streams:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    token_us, request_us = runner.run(
                        measure(case, num_streams, options.pulse_ms / 1e3)
                    )
                report.add("per token", token_us, "us", request=case.name, streams=num_streams)
                report.add("per request", request_us, "us", request=case.name, streams=num_streams)


if __name__ == "__main__":
    main()
