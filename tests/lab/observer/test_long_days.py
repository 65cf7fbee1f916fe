"""What a day of watching meets: records that were cut, full disks, nonsense, forecasts, growth."""

import asyncio
import io
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kunserve.core.errors import ConfigError
from kunserve_lab.observer.episodes.episode import Episode
from kunserve_lab.observer.episodes.what_if import Judged, Measured
from kunserve_lab.observer.output.show import JsonLines
from kunserve_lab.observer.readings import prometheus, record
from kunserve_lab.observer.readings.histogram import Histogram, merged
from kunserve_lab.observer.readings.page import PageError, parse_page
from kunserve_lab.observer.readings.record import Record, Recorder, by_moment
from kunserve_lab.observer.run import MOST_ON_PAGE, Observer
from kunserve_lab.observer.session import Session
from kunserve_lab.observer.settings import Made, Settings
from kunserve_lab.observer.trend import Trend
from kunserve_lab.observer.watch import LEAST_ENDED, LENGTHS_S, STALE_S
from tests.lab.observer.fake_servers import FakeServers
from tests.lab.observer.pages import SGLANG, VLLM, reading


@pytest.fixture
def servers() -> Iterator[FakeServers]:
    fakes = FakeServers()
    yield fakes
    fakes.stop()


def test_what_is_recorded_is_read_again(tmp_path: Path) -> None:
    readings = [one for at in range(4) for name in ("a", "b")
                for one in parse_page(VLLM, name, 10.0 + at)]  # fmt: skip
    recorder = Recorder(tmp_path / "fleet.jsonl")
    recorder.write(readings)
    recorder.close()
    assert list(Record(tmp_path / "fleet.jsonl")) == readings
    groups = list(by_moment(readings, 1.0))
    assert [len(group) for group in groups] == [2, 2, 2, 2]


def test_a_record_that_was_cut_goes_on_in_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "fleet.jsonl"
    first, second = parse_page(VLLM, "a", 10.0)[0], parse_page(VLLM, "a", 12.5)[0]
    for one in (first, second):
        recorder = Recorder(path)
        recorder.write([one])
        recorder.close()
        assert list(Record(path))[-1] == one
        with path.open("ab") as file:
            file.write(b'{"replica": "a", "time')
    found = Record(path)
    assert (list(found), found.num_left_out, found.period_s) == ([first, second], 2, 2.5)


def test_readings_of_two_recorders_are_in_order_of_time(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "fleet.jsonl")
    recorder.write(parse_page(VLLM, "a", at)[0] for at in (3.0, 4.0, 1.0, 2.0))
    recorder.close()
    assert [one.time_s for one in Record(tmp_path / "fleet.jsonl")] == [1.0, 2.0, 3.0, 4.0]


def test_who_waits_for_a_long_record_hears_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(tmp_path / "fleet.jsonl")
    recorder.write(parse_page(VLLM, "a", float(at))[0] for at in range(4))
    recorder.close()
    assert len(list(Record(tmp_path / "fleet.jsonl"))) == 4
    assert not capsys.readouterr().err
    monkeypatch.setattr(record, "LONG", 4)
    list(Record(tmp_path / "fleet.jsonl"))
    assert [line.rpartition(" ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "25%", "50%", "75%", "100%"
    ]  # fmt: skip


def test_histograms_together_are_as_if_added_one_by_one() -> None:
    draw = random.Random(1)
    some = [Histogram((1.0, 5.0), tuple(float(draw.randrange(9)) for _ in range(3)),
                      float(draw.randrange(99))) for _ in range(20)]  # fmt: skip
    added = some[0]
    for one in some[1:]:
        added = added + one
    assert merged(some) == added and merged(iter(some[:1])) == some[0] and merged([]) is None
    small = Histogram((2.0,), (1.0, 0.0), 1.0)
    assert merged([*some, small]) == added, "of two versions of a server the larger one stands"


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("one\ntwo\nthree\n")
    with pytest.raises(ConfigError, match=r"hardly a reading \(.*malformed.*\): expected a file"):
        Record(tmp_path / "other")
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match=r"hardly a reading \(it is empty\)"):
        Record(tmp_path / "empty")


def test_a_long_time_is_read_in_parts_and_in_order(
    servers: FakeServers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "MOST_POINTS", 4)
    moments = [1000.0 + 15.0 * at for at in range(10)]
    url = servers.prometheus({"a:8000": [(moment, VLLM) for moment in moments]})
    readings = prometheus.read_prometheus(url, moments[-1] - moments[0], 15.0, moments[-1])
    first = next(readings)
    assert first.time_s == moments[0] and "33%" in capsys.readouterr().err
    assert [first.time_s, *(one.time_s for one in readings)] == moments


def watched(
    settings: Settings,
    out: io.StringIO,
    until: Callable[[Observer], bool] = lambda observer: bool(observer._session.history),
) -> Observer:
    """Until then; what goes wrong is raised."""
    observer = Observer(settings, JsonLines(out))

    async def watch() -> None:
        stop = asyncio.Event()
        task = asyncio.create_task(observer.watch(stop))
        async with asyncio.timeout(60):
            while not task.done() and not until(observer):
                await asyncio.sleep(0.02)
        stop.set()
        await task

    asyncio.run(watch())
    return observer


def test_a_full_disk_ends_the_record_and_not_the_watching(
    servers: FakeServers, tmp_path: Path
) -> None:
    out, report = io.StringIO(), tmp_path / "day.html"
    url = servers.serve(lambda: VLLM)
    full = Path("/dev/full")
    watched(Settings(urls=(url,), period_s=0.1, record=full, report=report), out)
    assert "nothing more is recorded" in out.getvalue()
    assert "data:image/png;base64," in report.read_text()


class Closed(io.StringIO):
    """Whoever read has gone, as behind ``| head -1``."""

    def write(self, text: str) -> int:
        if self.tell():
            raise BrokenPipeError
        return super().write(text)


def test_a_reader_that_goes_loses_no_report(servers: FakeServers, tmp_path: Path) -> None:
    report = tmp_path / "day.html"
    settings = Settings(urls=(servers.serve(lambda: VLLM),), period_s=0.1, report=report)
    observer = Observer(settings, JsonLines(Closed()))
    with pytest.raises(BrokenPipeError):
        asyncio.run(asyncio.wait_for(observer.watch(asyncio.Event()), 60))
    assert "data:image/png;base64," in report.read_text()


def test_nonsense_of_one_server_keeps_no_other_from_being_watched(servers: FakeServers) -> None:
    page = VLLM.replace('Qwen2.5-14B"} 3.0', 'Qwen2.5-14B"} 1e308')
    urls = servers.serve(lambda: page), servers.serve(lambda: VLLM)
    name = urls[1].removeprefix("http://")

    def is_there(observer: Observer) -> bool:
        history = observer._session.history
        return len(history) > 2 and name in [one.name for one in history[-1].view.present]

    watched(Settings(urls=urls, period_s=0.1), io.StringIO(), is_there)


def test_what_a_reader_of_pages_does_not_foresee_is_told_of_its_server(
    servers: FakeServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = servers.serve(lambda: SGLANG), servers.serve(lambda: VLLM)

    def read(text: str, replica: str, time_s: float) -> Any:
        return 1 // 0 if text == SGLANG else parse_page(text, replica, time_s)

    monkeypatch.setattr("kunserve_lab.observer.readings.scrape.parse_page", read)
    observer = watched(
        Settings(urls=urls, period_s=0.1),
        io.StringIO(),
        lambda observer: bool(observer._session.replicas) and urls[0] in observer._errors,
    )
    assert "cannot be read: ZeroDivisionError" in observer._errors[urls[0]]
    assert len(observer._session.replicas) == 1


def test_no_number_of_requests_is_nobody() -> None:
    page = VLLM.replace('Qwen2.5-14B"} 2.0', 'Qwen2.5-14B"} -7')
    assert parse_page(page, "a", 1.0)[0].num_waiting == 0.0
    with pytest.raises(PageError):
        parse_page(VLLM.replace('num_gpu_blocks="1000"', 'num_gpu_blocks="²"'), "a", 1.0)


def test_ranks_of_data_parallelism_have_memories_of_their_own() -> None:
    """Those of tensor parallelism all tell of the same."""
    lines = [line for line in SGLANG.splitlines() if not line.startswith("#")]
    ranked = [line.replace('tp_rank="0"', f'tp_rank="{tensor}",dp_rank="{data}"')
              for line in lines for data in range(4) for tensor in range(2)
              if not tensor or "max_total_num_tokens" in line or "token_usage" in line]  # fmt: skip
    once = dict.fromkeys(ranked)
    (alone,) = parse_page(SGLANG, "a", 1.0)
    (together,) = parse_page("\n".join(once) + "\n", "a", 1.0)
    assert together.capacity_tokens == 4 * alone.capacity_tokens
    assert (together.num_running, together.kv_usage) == (4 * alone.num_running, alone.kv_usage)


def test_a_line_says_when_it_reaches_a_limit() -> None:
    trend = Trend(10.0)
    assert trend.reaches_in_s(1.0, 30.0) is None
    for second in range(20):
        trend.add(second, 0.02 * second)
    assert trend.reaches_in_s(1.0, 60.0) == pytest.approx((1.0 - 0.38) / 0.02)
    assert trend.reaches_in_s(1.0, 30.0) is None, "not so soon"
    assert trend.reaches_in_s(0.3, 30.0) == 0.0
    trend.clear()
    assert trend.reaches_in_s(0.0, 30.0) is None


def test_what_may_be_chance_foretells_nothing() -> None:
    """Of noise about a level, hardly any line rises for certain; of noise about a rise, most do."""
    draw = random.Random(0)
    found = {0.0: 0, 0.02: 0}
    for rise in found:
        for _ in range(200):
            trend = Trend(30.0)
            for second in range(31):
                trend.add(second, 0.3 + rise * (second - 30) + draw.gauss(0.0, 0.1))
            found[rise] += trend.reaches_in_s(0.9, 60.0) is not None
    assert found[0.0] < 10 and found[0.02] > 190


def test_a_replica_that_was_silent_is_not_full_soon() -> None:
    session, views = Session(Made(device="a800"), 1.0), []
    silent = range(20, 20 + int(2 * STALE_S))
    for second in range(60):
        now_s, readings = 1000.0 + second, []
        if second not in silent:
            counters = {"finished": 9.0 * second, "prompt_tokens": 90.0, "generation_tokens": 9.0}
            readings = [reading(now_s, counters=counters, num_running=4.0, kv_usage=0.6)]
        views.append(session.feed(readings, now_s)[0])
    assert any(one.is_stale for view in views for one in view.replicas)
    assert {view.full_in_s for view in views} == {None}


def test_lengths_are_those_of_late() -> None:
    """Weeks of short prompts, and then long ones."""
    session = Session(Made(device="a800"), 1.0)
    demands, bounds = [], (100.0, 10_000.0)
    for second in range(int(LENGTHS_S) + 60):
        num_long = max(0, second - 30)
        counts = (1e6, float(num_long), 0.0)
        told = Histogram(bounds, counts, 50.0 * counts[0] + 5000.0 * num_long)
        finished = counts[0] + num_long
        one = reading(
            1000.0 + second, num_running=4.0, num_waiting=3.0, kv_usage=0.5,
            counters={"finished": finished, "prompt_tokens": told.total, "generation_tokens": 0.0},
            histograms={"input_tokens": told},
        )  # fmt: skip
        view, _ = session.feed([one], 1000.0 + second)
        demands.append(view.replicas[0].demand)
    short, long = 3 * 4 / 3000, 3 * 313 / 3000
    assert demands[30] - 0.5 == pytest.approx(short, abs=1e-3)
    assert demands[30 + LEAST_ENDED] - 0.5 == pytest.approx(long, abs=1e-3)
    assert demands[-1] == demands[30 + LEAST_ENDED]


def test_compute_that_fills_up_is_foretold() -> None:
    session, found = Session(Made(device="a800"), 1.0), []
    tokens = 0.0
    for second in range(60):
        tokens += 150.0 * second
        counters = {"finished": 1.0, "prompt_tokens": tokens, "generation_tokens": 1.0}
        one = reading(1000.0 + second, num_running=4.0, kv_usage=0.1, counters=counters)
        found.append(session.feed([one], 1000.0 + second)[0].busy_in_s)
    known = [one for one in found if one is not None]
    assert known and known == sorted(known, reverse=True) and known[-1] == 0.0


def test_a_live_page_shows_the_newest_episodes_and_a_report_all(tmp_path: Path) -> None:
    report = tmp_path / "day.html"
    observer = Observer(Settings(urls=("http://a",), report=report))
    observer._session.feed([reading(1000.0)], 1000.0)
    for at in range(MOST_ON_PAGE + 3):
        episode = Episode(1000.0 + at, 1001.0 + at, ("a:1",), {}, {}, ())
        observer.judged.append(Judged(episode, Measured(None, None, None, 1), why_not="none"))
    page = observer.page()
    assert page.count("<h2>Episode ") == MOST_ON_PAGE
    assert "Episodes 1 to 3 are in the report" in page and "<h2>Episode 13<" in page
    observer._write_report()
    assert report.read_text().count("<h2>Episode ") == MOST_ON_PAGE + 3
