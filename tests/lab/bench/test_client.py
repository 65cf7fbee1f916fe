"""The client against a server that behaves, and against servers that do not."""

import asyncio
import socket
import time

import pytest

from kunserve.core.errors import ConfigError
from kunserve_lab.bench.client import Call, CallSettings, stream
from kunserve_lab.bench.prompts import TokenIdPrompts, TokenizedPrompts, WordPrompts
from kunserve_lab.bench.records import RequestRecord
from kunserve_lab.bench.replay import Bodies, open_session, replay
from kunserve_lab.bench.session import ServerUnreachable, Target, find_model, measure
from kunserve_lab.workload.workload import Lengths, Workload

COMPLETIONS = CallSettings(model="fake-model", endpoint="/v1/completions", chat=False)
CHAT = CallSettings(model="fake-model", endpoint="/v1/chat/completions", chat=True)


def workload(count: int, gap_s: float = 0.0, output_tokens: int = 5) -> Workload:
    return Workload(
        tuple(number * gap_s for number in range(count)),
        Lengths((7,) * count, (output_tokens,) * count, "test"),
        "test",
    )


def run(
    url: str | tuple[str, ...],
    load: Workload,
    settings: CallSettings = COMPLETIONS,
    max_concurrency: int | None = None,
) -> list[RequestRecord]:
    servers = (url,) if isinstance(url, str) else url
    prompts = WordPrompts(0) if settings.chat else TokenIdPrompts(0, 1000)

    async def go() -> list[RequestRecord]:
        async with open_session(settings.timeout_s) as session:
            requests = load.requests()
            bodies = Bodies(settings, prompts, requests, ahead_bytes=30)
            start_s = time.perf_counter()
            return await replay(
                session, settings, servers, requests, bodies, start_s, max_concurrency
            )

    return asyncio.run(go())


def test_a_stream_of_completions(server) -> None:
    server.behaviour.gap_s = 0.01
    (record,) = run(server.url, workload(1))
    assert record.error is None and record.finish_reason == "length"
    assert (record.input_tokens, record.output_tokens) == (7, 5)
    assert len(record.token_times_s) == 5
    assert list(record.token_times_s) == sorted(record.token_times_s)
    assert record.token_times_s[-1] == record.last_token_s <= record.finish_s
    body = server.bodies[0]
    assert len(body["prompt"]) == 7 and max(body["prompt"]) < 1000
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["temperature"]) == (5, 0.0)
    assert "ignore_eos" not in body


def test_a_chat_stream_does_not_count_its_opening(server) -> None:
    (record,) = run(server.url, workload(1), CHAT)
    assert record.error is None and len(record.token_times_s) == 5
    assert server.bodies[0]["messages"][0]["content"].count(" ") == 6


def test_tokens_are_counted_by_usage_when_there_is_one(server) -> None:
    server.behaviour.tokens_per_chunk = 3
    (record,) = run(server.url, workload(1, output_tokens=8))
    assert (record.output_tokens, len(record.token_times_s)) == (8, 3)
    server.behaviour.usage = False
    (record,) = run(server.url, workload(1, output_tokens=8))
    assert (record.output_tokens, record.input_tokens) == (3, 7)


def test_requests_leave_on_time_and_servers_take_turns(server, second_server) -> None:
    server.behaviour.gap_s = 0.5  # an answer takes much longer than all sends
    records = run((server.url, second_server.url), workload(6, gap_s=0.03))
    assert [record.server for record in records] == [server.url, second_server.url] * 3
    assert all(record.sent_s >= record.planned_s for record in records)
    assert max(record.sent_s for record in records) < records[0].finish_s


def test_max_concurrency_holds_requests_back(server) -> None:
    server.behaviour.gap_s = 0.01
    records = run(server.url, workload(3), max_concurrency=1)
    assert records[1].sent_s >= records[0].finish_s
    assert records[2].sent_s >= records[1].finish_s


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"status": 503}, "HTTP 503: as told"),
        ({"status": 400}, "HTTP 400: as told"),
        ({"cut_after": 2}, "the stream was cut off"),
        ({"error_after": 2}, "error in stream: engine died"),
        ({"raw": b"data: {nonsense\n\n"}, "malformed stream"),
        ({"raw": b"data: [DONE]\n\n"}, "without a token"),
        ({"raw": b"<html>hello</html>\n"}, "not a stream"),
        ({"raw": b""}, "not a stream"),
        ({"raw": b'data: {"choices": [{"text": "a"}]}\n\n'}, "ended early"),
        ({"raw": b"\x00\xff" * 70_000}, "not a stream"),
        (
            {"raw": b'data: {"choices": [{"text": "a", "finish_reason": "abort"}]}\n\n'},
            "ended by abort",
        ),
    ],
)
def test_failures_have_reasons(server, told: dict[str, object], reason: str) -> None:
    for name, value in told.items():
        setattr(server.behaviour, name, value)
    records = run(server.url, workload(3))
    assert len(records) == 3
    assert all(record.error is not None and reason in record.error for record in records)


def test_a_cut_stream_keeps_what_arrived(server) -> None:
    server.behaviour.cut_after = 2
    (record,) = run(server.url, workload(1))
    assert len(record.token_times_s) == 2 and not record.succeeded


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        records = run(url, workload(2))
    assert [record.error for record in records] == ["connection refused"] * 2


def test_a_server_that_hangs_is_timed_out(server) -> None:
    server.behaviour.hang = True
    settings = CallSettings(model="m", endpoint="/v1/completions", chat=False, timeout_s=0.3)
    (record,) = run(server.url, workload(1), settings)
    assert record.error == "timed out"


class StopsWhileServerHangs:
    """Three requests are answered, then the server hangs. With three more, the run is stopped."""

    def __init__(self, server) -> None:
        self.server = server
        self.stop = asyncio.Event()
        self.num_answered = self.num_hanging = 0

    def sent(self) -> None:
        self.num_hanging += self.server.behaviour.hang
        if self.num_hanging == 3:
            self.stop.set()

    def ended(self, record: RequestRecord) -> None:
        self.num_answered += 1
        self.server.behaviour.hang = self.num_answered >= 3


def test_stopping_keeps_records(server) -> None:
    async def go() -> list[RequestRecord]:
        watcher = StopsWhileServerHangs(server)
        async with open_session(60) as session:
            requests = workload(200, gap_s=0.05, output_tokens=4).requests()
            bodies = Bodies(COMPLETIONS, TokenIdPrompts(0), requests)
            start_s, servers = time.perf_counter(), (server.url,)
            return await replay(
                session,
                COMPLETIONS,
                servers,
                requests,
                bodies,
                start_s,
                None,
                watcher,
                watcher.stop,
            )

    records = asyncio.run(go())
    assert 6 <= len(records) < 200
    errors = [record.error for record in records]
    assert errors.count(None) >= 3 and set(errors) == {None, "interrupted"}


def test_measure_warms_up_and_samples(server) -> None:
    server.behaviour.gap_s = 0.05
    target = Target((server.url,), COMPLETIONS, (f"{server.url}/metrics",), num_warmups=2)
    outcome = asyncio.run(measure(target, workload(2, output_tokens=16), TokenIdPrompts(0)))
    assert len(outcome.records) == 2 and len(server.bodies) == 4
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 4
    assert outcome.samples and outcome.samples[0].num_running == 3.0
    assert outcome.num_missed_samples == 0
    assert outcome.duration_s >= max(record.finish_s for record in outcome.records)


def test_a_warm_up_that_hangs_can_be_stopped(server) -> None:
    server.behaviour.hang = True
    target = Target((server.url,), COMPLETIONS, (), num_warmups=1)

    async def go() -> tuple[RequestRecord, ...]:
        stop = asyncio.Event()
        measuring = measure(target, workload(2), TokenIdPrompts(0), stop=stop)
        task = asyncio.create_task(measuring)
        while not server.bodies:
            await asyncio.sleep(0.01)
        stop.set()
        return (await asyncio.wait_for(task, 10.0)).records

    assert asyncio.run(go()) == () and len(server.bodies) == 1


def test_a_server_without_metrics_is_no_obstacle(server) -> None:
    server.behaviour.metrics = None
    target = Target((server.url,), COMPLETIONS, (f"{server.url}/metrics",))
    outcome = asyncio.run(measure(target, workload(1), TokenIdPrompts(0)))
    assert outcome.samples == () and outcome.records[0].succeeded


def test_finding_the_model(server) -> None:
    assert asyncio.run(find_model((server.url,), None, None, 5)) == "fake-model"
    assert asyncio.run(find_model((server.url,), "mine", None, 5)) == "mine"
    server.behaviour.models = []
    with pytest.raises(ConfigError, match="--model"):
        asyncio.run(find_model((server.url,), None, None, 5))
    server.behaviour.api_key = "secret"
    with pytest.raises(ServerUnreachable, match="--api-key"):
        asyncio.run(find_model((server.url,), None, "wrong", 5))
    assert asyncio.run(find_model((server.url,), "m", "secret", 5)) == "m"


def test_an_absent_server_is_waited_for_once_told() -> None:
    told: list[str] = []
    with pytest.raises(ServerUnreachable, match="connection refused"):
        asyncio.run(find_model(("http://127.0.0.1:9",), None, None, 0.6, told.append))
    assert len(told) == 1


def test_prompts_are_repeatable_and_differ() -> None:
    source = TokenIdPrompts(3, 500)
    assert source.prompt(1, 40) == TokenIdPrompts(3, 500).prompt(1, 40) != source.prompt(2, 40)
    words = WordPrompts(3)
    assert len(words.prompt(0, 25).split()) == 25
    assert words.prompt(0, 25) != words.prompt(1, 25)


def test_stream_survives_a_bad_url() -> None:
    async def go() -> RequestRecord:
        call = Call(0, "http://[bad", 0.0, 1, 1, 0.0, [])
        async with open_session(5) as session:
            return await stream(session, COMPLETIONS, call, b"{}", 0.0)

    assert "URL" in (asyncio.run(go()).error or "")


class SlowTokenizer:
    """One token per letter, and a beginning-of-text token."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        letters = [ord(letter) for letter in text]
        return [1, *letters] if add_special_tokens else letters

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(token) for token in token_ids if token != 1)


def test_tokenized_prompts_have_the_wanted_length() -> None:
    source = TokenizedPrompts(0, SlowTokenizer())
    for wanted in (1, 9, 200):
        text = source.prompt(0, wanted)
        num_tokens = len(SlowTokenizer().encode(text))
        assert num_tokens == wanted or (wanted <= 8 and num_tokens == wanted + 1)
    assert source.prompt(0, 50) != source.prompt(1, 50)
