"""``kunserve observe`` against servers on loopback, files and a Prometheus server."""

import asyncio
import io
import json
import multiprocessing.context
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from kunserve.core.errors import ConfigError
from kunserve_lab.observer.command import observe_command
from kunserve_lab.observer.episodes import aside
from kunserve_lab.observer.episodes.aside import Judging, JudgingAll, Work, judge_aside
from kunserve_lab.observer.episodes.episode import Episodes
from kunserve_lab.observer.episodes.what_if import Judged, Measured, measured_of
from kunserve_lab.observer.output.show import JsonLines, LiveTable, PlainLines
from kunserve_lab.observer.readings.page import parse_page
from kunserve_lab.observer.readings.prometheus import read_prometheus, seconds_of
from kunserve_lab.observer.readings.record import Recorder, by_moment
from kunserve_lab.observer.run import Observer
from kunserve_lab.observer.session import Session
from kunserve_lab.observer.settings import Made, Settings
from tests.conftest import PATIENCE_S
from tests.lab.observer.fake_servers import FakeServers
from tests.lab.observer.pages import SGLANG, VLLM, reading


@pytest.fixture
def servers() -> Iterator[FakeServers]:
    fakes = FakeServers()
    yield fakes
    fakes.stop()


def watch(settings: Settings, until: Any, limit_s: float = 60.0) -> list[dict[str, Any]]:
    """The JSON lines that come until ``until`` says that they are enough."""
    out = io.StringIO()

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in out.getvalue().splitlines()]

    async def watched() -> None:
        stop = asyncio.Event()
        task = asyncio.create_task(Observer(settings, JsonLines(out)).watch(stop))
        async with asyncio.timeout(limit_s):
            while not task.done() and not until(lines()):
                await asyncio.sleep(0.02)
        stop.set()
        await task

    asyncio.run(watched())
    return lines()


def test_a_fleet_of_both_kinds_is_watched(servers: FakeServers) -> None:
    urls = (servers.serve(lambda: VLLM), servers.serve(lambda: SGLANG))
    lines = watch(
        Settings(urls=urls, period_s=0.1),
        lambda seen: any(len(line["view"]["replicas"]) == 2 for line in seen),
    )
    first, second = sorted(lines[-1]["view"]["replicas"], key=lambda one: one["num_running"])
    assert (first["num_running"], first["num_waiting"], first["kv_usage"]) == (3, 2, 0.5)
    assert (second["num_running"], second["kv_usage"]) == (4, 0.25)
    assert lines[-1]["errors"] == {}


def test_a_server_that_hangs_and_one_that_is_gone_stop_no_other(servers: FakeServers) -> None:
    hangs = iter([VLLM, VLLM])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{probe.getsockname()[1]}"
        urls = (servers.serve(lambda: VLLM), servers.serve(lambda: next(hangs, None)), gone)

        def is_enough(seen: list[dict[str, Any]]) -> bool:
            if not seen or len(seen[-1]["view"]["replicas"]) < 2:
                return False
            return sum(one["is_stale"] for one in seen[-1]["view"]["replicas"]) == 1

        lines = watch(Settings(urls=urls, period_s=0.1), is_enough)
    states = sorted(one["state"] for one in lines[-1]["view"]["replicas"])
    assert states == ["no answer", "well"]
    errors = lines[-1]["errors"]
    assert "no server at" in errors[gone]
    assert "gave no answer in 2 s" in errors[urls[1]]


def test_its_own_metrics_and_page(servers: FakeServers) -> None:
    url = servers.serve(lambda: VLLM)
    found: dict[str, str] = {}

    async def observed() -> None:
        stop = asyncio.Event()
        observer = Observer(Settings(urls=(url,), period_s=0.1, port=0), JsonLines(io.StringIO()))
        task = asyncio.create_task(observer.watch(stop))
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            while observer._endpoint is None or not observer._session.history:
                await asyncio.sleep(0.02)
            runner = observer._endpoint._runner
            assert runner is not None
            own = f"http://127.0.0.1:{runner.addresses[0][1]}"
            for path in ("/metrics", "/state", "/"):
                async with session.get(own + path) as answer:
                    assert answer.status == 200
                    found[path] = await answer.text()
        stop.set()
        await task

    asyncio.run(observed())
    name = url.removeprefix("http://")
    assert f'kunserve_observe_kv_usage_ratio{{replica="{name}"}} 0.5' in found["/metrics"]
    assert 'kunserve_observe_episodes_total{cause="memory"} 0.0' in found["/metrics"]
    assert json.loads(found["/state"])["replicas"][0]["num_waiting"] == 2
    assert "data:image/png;base64," in found["/"]


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("<html>hello</html>", "give a server's own address"),
        (404, "answers 404: expected 200"),
        (401, "give --api-key"),
        (VLLM.replace("Qwen/Qwen2.5-14B", "my-alias"), "Give --model"),
    ],
)
def test_mistakes_are_told(servers: FakeServers, page: str | int, words: str) -> None:
    url = servers.serve(lambda: page)
    result = CliRunner().invoke(observe_command, ["--urls", url, "--duration", "60"])
    assert result.exit_code == 1
    assert words in result.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "one of --urls, --from and --prometheus"),
        (["--urls", "a:8000"], "must begin with http://"),
        (["--urls", "http://a,http://a"], "twice"),
        (["--from", "/nowhere/at/all"], "--from /nowhere/at/all: No such file"),
        (["--prometheus", "http://127.0.0.1:1", "--since", "yesterday"], "24h"),
        (["--prometheus", "http://127.0.0.1:1"], "no Prometheus server at"),
    ],
)
def test_flags_that_cannot_work(flags: list[str], words: str) -> None:
    result = CliRunner().invoke(observe_command, flags)
    assert result.exit_code == 1
    assert words in result.output


def test_help_teaches() -> None:
    text = CliRunner().invoke(observe_command, ["--help"]).output
    for word in ("Examples", "--prometheus", "compute was short: more replicas", "--record"):
        assert word in text


def burst() -> list[Any]:
    """A replica whose memory is short for half a minute, and one beside it."""
    readings = []
    for second in range(90):
        waits = 20.0 if 30 <= second < 60 else 0.0
        done = {"finished": second * 1.0, "prompt_tokens": second * 500.0,
                "generation_tokens": second * 100.0, "preemptions": 0.0}  # fmt: skip
        values = {"counters": done, "num_running": 20.0}
        usage = 0.99 if waits else 0.4
        readings.append(reading(1000.0 + second, "a", kv_usage=usage, num_waiting=waits, **values))
        readings.append(reading(1000.0 + second, "b", kv_usage=0.2, **values))
    return readings


def canned(work: Work, deadline_s: float = 0.0, given_up: object = None) -> Judged:
    return Judged(work[0], measured_of(work[0]), factors=work[2], why_not="nobody simulated it")


def test_a_record_is_judged_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "judge_aside", canned)
    recorder = Recorder(tmp_path / "fleet.jsonl")
    recorder.write(burst())
    recorder.close()
    report = tmp_path / "day.html"
    result = CliRunner().invoke(
        observe_command, ["--from", str(tmp_path / "fleet.jsonl"), "--report", str(report)]
    )
    assert result.exit_code == 0, result.output
    assert "memory was short on 1 of 2 replicas" in result.output
    assert "1 burst was too much for a replica" in result.output
    assert "nobody simulated it" in report.read_text()
    assert "data:image/png;base64," in report.read_text()


def test_bursts_of_a_day_are_judged_at_once_and_told_in_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both, told = threading.Barrier(2), list[str]()

    def slow(work: Work, deadline_s: float, given_up: threading.Event) -> Judged:
        number = int(str(work[0]))
        both.wait(PATIENCE_S)
        assert number or not given_up.wait(0.1), "the later one ends first"
        return Judged(work[0], Measured(None, None, None, 0), why_not=str(number))

    monkeypatch.setattr(aside, "judge_aside", slow)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    judging = JudgingAll(lambda judged: told.append(judged.why_not))
    for number in range(4):
        judging.give((number, None, None, None))  # type: ignore[arg-type]
    judging.finish()
    judging.close()
    assert told == ["0", "1", "2", "3"]
    said = capsys.readouterr().err
    assert "2 at once" in said and said.endswith("bursts simulated: 4 of 4\n")


def test_nobody_waits_for_bursts_of_a_day_that_was_broken_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def endless(work: Work, deadline_s: float, given_up: threading.Event) -> Judged:
        assert given_up.wait(PATIENCE_S)
        return Judged(work[0], Measured(None, None, None, 0))

    monkeypatch.setattr(aside, "judge_aside", endless)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    told: list[Judged] = []
    judging = JudgingAll(told.append)
    for number in range(16):
        judging.give((number, None, None, None))  # type: ignore[arg-type]
    judging.close()
    assert told == []


def test_one_burst_is_one_episode() -> None:
    session = Session(Made(device="a800"), 1.0)
    episodes = []
    for group in by_moment(burst(), 1.0):
        _, episode = session.feed(group, group[0].time_s)
        episodes += [] if episode is None else [episode]
    assert session.close() is None
    (one,) = episodes
    assert 1029.0 <= one.begin_s <= 1033.0
    assert 1058.0 <= one.end_s <= 1061.0
    assert set(one.memory_s) == {"a"}
    assert one.replicas == ("a", "b")
    assert one.num_drops >= 1
    assert one.during[0].after.time_s >= one.begin_s
    assert one.changes[0].before.time_s <= 1000.0 + 1.0


def test_a_short_moment_is_no_episode() -> None:
    session = Session(Made(device="a800"), 1.0)
    for group in by_moment(burst()[:62], 1.0):  # the burst lasts one second of them
        assert session.feed(group, group[0].time_s)[1] is None
    assert not session.in_burst


def test_plain_lines_say_what_changed() -> None:
    out = io.StringIO()
    shower, session = PlainLines(out), Session(Made(device="a800"), 1.0)
    for group in by_moment(burst()[:100], 1.0):
        shower.show(session.feed(group, group[0].time_s)[0], {})
    text = out.getvalue()
    assert "2 replicas; KV 30%" in text
    assert "memory short on 1" in text
    assert "would drop groups=a+b" in text
    assert len(text.splitlines()) < 20


def test_the_table_has_a_row_for_each_replica() -> None:
    out, session = io.StringIO(), Session(Made(device="a800"), 1.0)
    table = LiveTable(out)
    for group in by_moment(burst()[:100], 1.0):
        table.show(session.feed(group, group[0].time_s)[0], {"c": "no server at c"})
    episode = session.close()
    assert episode is not None
    table.tell(canned((episode, *session.make_of(episode), session.made)))
    table.close()
    text = out.getvalue()
    assert "memory short" in text
    assert "no server at c" in text
    assert "nobody simulated it" in text


def test_a_replica_of_another_model_is_told_and_left_out() -> None:
    session = Session(Made(device="a800"), 1.0)
    other = reading(1000.0, "b", model="meta-llama/Llama-3.1-8B")
    view, _ = session.feed([reading(1000.0, "a"), other], 1000.0)
    assert [one.name for one in view.replicas] == ["a"]
    assert "observe each model by itself" in session.refused["b"]
    with pytest.raises(ConfigError, match="--model"):
        Session(Made(), 1.0).feed([reading(1000.0, "a", model="my-alias")], 1000.0)


def test_a_fleet_from_prometheus(servers: FakeServers) -> None:
    moments = [1000.0, 1015.0, 1030.0]
    url = servers.prometheus(
        {name: [(moment, VLLM) for moment in moments] for name in ("a:8000", "b:8000")}
    )
    readings = list(read_prometheus(url, 60.0, 15.0, 1040.0))
    expected = [one for moment in moments for name in ("a:8000", "b:8000")
                for one in parse_page(VLLM, name, moment)]  # fmt: skip
    assert sorted(readings, key=lambda one: (one.time_s, one.replica)) == expected


def test_a_prometheus_without_a_fleet_is_told(servers: FakeServers) -> None:
    url = servers.prometheus({})
    with pytest.raises(ConfigError, match=r"no vllm: or sglang: series that match job"):
        list(read_prometheus(url, 60.0, 15.0, 1040.0, 'job="vllm"'))


def test_spans() -> None:
    assert seconds_of("24h") == 86_400.0
    assert seconds_of("1d12h") == 129_600.0
    for text in ("", "5", "h", "5x", "5h!"):
        with pytest.raises(ConfigError):
            seconds_of(text)


def short_work() -> Work:
    session = Session(Made(device="a800"), 1.0)
    for group in by_moment(burst()[:100], 1.0):
        session.feed(group, group[0].time_s)
    episode = session.close()
    assert episode is not None
    return episode, *session.make_of(episode), session.made


def test_a_simulation_that_takes_too_long_is_killed() -> None:
    work = short_work()
    judged = judge_aside(work, 0.0, threading.Event())
    assert "took longer than 0 s" in judged.why_not
    assert judged.measured == measured_of(work[0]) and judged.measured.num_arrived
    assert judged.episode.changes == (), "its readings are megabytes that nobody asks for"


def test_too_many_episodes_are_told_without_figures() -> None:
    work = short_work()
    told: list[Judged] = []

    async def give() -> None:
        judging = Judging(told.append)
        for _ in range(20):
            judging.give(work)

    asyncio.run(give())
    assert len(told) == 4
    assert "too many episodes" in told[0].why_not


def test_the_end_waits_no_longer_than_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    work = short_work()
    told: list[Judged] = []

    async def leave() -> None:
        judging = Judging(told.append, deadline_s=0.0)
        judging.start()
        for _ in range(3):
            judging.give(work)
        await judging.finish()

    asyncio.run(leave())
    assert [one.why_not for one in told[1:]] == ["the watching ended"] * 2
    assert "bursts that are simulated still: 3" in capsys.readouterr().err


def test_one_that_cannot_be_told_keeps_no_other_from_it() -> None:
    """Nor the end: what went wrong is raised there."""
    work = short_work()
    told: list[Judged] = []

    def tell(judged: Judged) -> None:
        told.append(judged)
        if len(told) == 1:
            raise BrokenPipeError

    async def leave() -> None:
        judging = Judging(tell, deadline_s=0.0)
        judging.start()
        for _ in range(3):
            judging.give(work)
        with pytest.raises(BrokenPipeError):
            async with asyncio.timeout(60.0):
                await judging.finish()

    asyncio.run(leave())
    assert len(told) == 3


def test_without_a_process_for_it_an_episode_is_told_without_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_process: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", refuse)
    judged = judge_aside(short_work(), 0.0, threading.Event())
    assert "Cannot allocate memory" in judged.why_not


def test_episodes_forget_what_is_old() -> None:
    session = Session(Made(device="a800"), 1.0)
    session._episodes = Episodes(lead_s=5.0)
    for group in by_moment(burst()[:60], 1.0):
        session.feed(group, group[0].time_s)
    assert len(session._episodes._changes) <= 2 * 9
