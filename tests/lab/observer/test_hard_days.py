"""What an operator's day has: mistyped flags, clocks that are set, servers that fall silent."""

import io
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kunserve.core.errors import ConfigError
from kunserve_lab.observer.command import observe_command
from kunserve_lab.observer.episodes.episode import CALM_S, Episode
from kunserve_lab.observer.output.report import report_html
from kunserve_lab.observer.output.show import PlainLines
from kunserve_lab.observer.readings.names import SGLANG, VLLM
from kunserve_lab.observer.readings.page import Reading, parse_page
from kunserve_lab.observer.run import Observer
from kunserve_lab.observer.session import LONGEST_GAP_S, Session
from kunserve_lab.observer.settings import Made, Settings, settings_of
from tests.lab.observer.fake_fleet import FakeFleet, fleet
from tests.lab.observer.fake_servers import FakeServers
from tests.lab.observer.pages import VLLM as PAGE
from tests.lab.observer.pages import reading
from tests.lab.observer.test_observe import watch

MODEL = "Qwen/Qwen2.5-14B"


@pytest.fixture
def servers() -> Iterator[FakeServers]:
    fakes = FakeServers()
    yield fakes
    fakes.stop()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--from", "a", "--port", "0"], "--port is for watching servers"),
        (["--prometheus", "http://a", "--record", "b"], "--record is for watching servers"),
        (["--from", "a", "--duration", "3"], "--duration is for watching servers"),
        (["--urls", "http://a", "--selector", "x"], "--selector goes with --prometheus"),
        (["--prometheus", "prometheus:9090"], "--prometheus: 'prometheus:9090' must begin with"),
        (["--urls", "http://a,http://a/"], "twice"),
        (["--urls", "http://a/metrics,http://a"], "twice"),
        (["--urls", "http://127.0.0.1:1", "--report", "/nowhere/at.html"], "--report /nowhere/at"),
    ],
)
def test_flags_that_would_do_nothing(flags: list[str], words: str) -> None:
    result = CliRunner().invoke(observe_command, flags)
    assert result.exit_code == 1
    assert words in result.output


def test_the_address_of_a_page_is_that_of_its_server(servers: FakeServers) -> None:
    url = servers.serve(lambda: PAGE)
    result = CliRunner().invoke(observe_command, ["--urls", f"{url}/metrics", "--duration", "0.1"])
    assert result.exit_code == 0, result.output
    assert "1 replica;" in result.output and "0 drops" in result.output


def test_a_page_that_is_no_prometheus_server(servers: FakeServers) -> None:
    flags = ["--prometheus", servers.serve(lambda: PAGE)]
    result = CliRunner().invoke(observe_command, flags)
    assert "answers 404 and no JSON: is it a Prometheus server?" in result.output


def test_a_clock_that_is_set_back_changes_nothing(
    servers: FakeServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, really = iter(range(3, 1000)), time.time

    def page() -> str:
        number = next(running)
        if number == 6:
            monkeypatch.setattr(time, "time", lambda: really() - 3600.0)
        return PAGE.replace('Qwen2.5-14B"} 3.0', f'Qwen2.5-14B"}} {number}.0')

    def is_enough(seen: list[dict[str, object]]) -> bool:
        return bool(seen) and seen[-1]["view"]["replicas"][0]["num_running"] > 8  # type: ignore[index]

    lines = watch(Settings(urls=(servers.serve(page),), period_s=0.1), is_enough)
    moments = [line["view"]["time_s"] for line in lines]
    assert moments == sorted(moments) and moments[-1] - moments[0] < 600.0
    assert lines[-1]["view"]["replicas"][0]["state"] != "no answer"


def running(
    moment_s: float, finished: float, kv_usage: float = 0.2, num_waiting: float = 0.0
) -> Reading:
    counters = {"finished": finished, "prompt_tokens": finished * 9, "generation_tokens": finished}
    return reading(
        moment_s, counters=counters, num_running=4.0, kv_usage=kv_usage, num_waiting=num_waiting
    )


def test_what_came_in_a_long_silence_is_not_counted() -> None:
    session = Session(Made(device="a800"), 1.0)
    after_s = 1010.0 + 2 * LONGEST_GAP_S
    for second in range(10):
        session.feed([running(1000.0 + second, second)], 1000.0 + second)
    session.feed([running(after_s, 5000.0)], after_s)
    view, _ = session.feed([running(after_s + 1.0, 5001.0)], after_s + 1.0)
    assert view.replicas[0].arrivals_per_s == 1.0
    assert max(change.elapsed_s for change in session._changes) == 1.0
    assert sum(change.num_arrived for change in session._changes) == 9 + 1


def test_nobody_was_short_while_nobody_looked() -> None:
    """Servers fall silent in a burst, and are as short when they answer again."""
    session, found = Session(Made(device="a800"), 1.0), []
    moments = [*range(20), *range(200, 215), *range(215, 240)]
    for moment in moments:
        waits = 20.0 if moment < 215 else 0.0
        one = running(1000.0 + moment, moment, kv_usage=0.99 if waits else 0.2, num_waiting=waits)
        found.append(session.feed([one], 1000.0 + moment)[1])
    episodes: list[Episode] = [one for one in found if one is not None]
    assert episodes and sum(one.memory_s["a:1"] for one in episodes) <= 20 + 15 + CALM_S + 1


def test_a_server_that_began_anew_in_a_burst() -> None:
    """Its totals fall; what is counted from then on is its own."""
    session, found = Session(Made(device="a800"), 1.0), []
    for moment in range(60):
        waits, done = (20.0, moment) if moment < 30 else (0.0, moment - 30)
        one = running(1000.0 + moment, done, kv_usage=0.99 if waits else 0.2, num_waiting=waits)
        found.append(session.feed([one], 1000.0 + moment)[1])
    (episode,) = [one for one in found if one is not None]
    assert all(value >= 0 for change in episode.changes for value in change.amounts.values())
    assert sum(change.began_anew for change in session._changes) == 1
    assert 1028.0 <= episode.end_s <= 1032.0


def in_sglang(page: str) -> str:
    """vLLM's page under SGLang's names."""
    names = {**VLLM.counters, **VLLM.histograms}
    theirs = {**SGLANG.counters, **SGLANG.histograms}
    for ours, (name, *_) in names.items():
        if ours in theirs:
            page = page.replace(name, theirs[ours][0])
    for kind in ("running", "waiting", "kv_usage"):
        page = page.replace(getattr(VLLM, kind)[0], getattr(SGLANG, kind)[0])
    page = page.replace("vllm:cache_config_info", "sglang:cache_config_info")
    page = page.replace("num_gpu_blocks", "num_pages").replace("block_size", "page_size")
    assert "vllm:" not in page
    return page.replace('engine="0",', "").replace(',engine="0"', "")


def test_sglang_is_judged_as_vllm_is() -> None:
    seen: FakeFleet = fleet(1.6)
    sessions = [Session(Made(device="a800"), 1.0) for _ in range(2)]
    episodes: list[list[Episode]] = [[], []]
    for second in range(0, seen.num_seconds, 3):
        page = seen.replicas[0].page(second)
        for at, text in enumerate((page, in_sglang(page))):
            (one,) = parse_page(text, "a:1", float(second))
            _, episode = sessions[at].feed([one], float(second))
            episodes[at] += [] if episode is None else [episode]
    ours, theirs = ([point.view for point in session.history] for session in sessions)
    assert ours == theirs
    for one, other in zip(*episodes, strict=True):
        assert (one.begin_s, one.end_s, one.memory_s) == (
            other.begin_s,
            other.end_s,
            other.memory_s,
        )
        assert [c.amounts for c in one.changes] == [c.amounts for c in other.changes]
    assert episodes[0]
    kinds = {name for change in episodes[1][0].changes for name in change.histograms}
    assert kinds == {"ttft", "itl", "e2e", "input_tokens", "output_tokens"}


def test_a_live_page_shows_the_fleet_now_and_a_report_does_not(tmp_path: Path) -> None:
    observer = Observer(Settings(urls=("http://a",), report=tmp_path / "r.html"))
    observer._session.feed([running(1000.0, 1.0, kv_usage=0.42)], 1000.0)
    observer._errors = {"b": "no server at <b>"}
    live = observer.page()
    assert "<h2>Now</h2>" in live and "<td>42%</td>" in live and "http-equiv=refresh" in live
    assert "no server at &lt;b&gt;" in live
    assert "refresh" not in report_html(observer._session.history, [], [])


def test_a_server_that_is_gone_is_told_once() -> None:
    out, session = io.StringIO(), Session(Made(device="a800"), 1.0)
    shower, errors = PlainLines(out), {"b": "no server at b"}
    for second in range(40):
        waits = 20.0 if second > 20 else 0.0
        one = running(1000.0 + second, second, 0.99 if waits else 0.2, waits)
        shower.show(session.feed([one], 1000.0 + second)[0], errors)
    assert out.getvalue().count("no server at b") == 1
    assert "memory short on 1" in out.getvalue()


def test_settings_need_one_source() -> None:
    flags = {"urls": "", "file": None, "prometheus": None}
    with pytest.raises(ConfigError, match="one of --urls"):
        settings_of(flags)


def test_one_that_is_broken_off_leaves_no_empty_report(tmp_path: Path) -> None:
    old, new = tmp_path / "old.html", tmp_path / "new.html"
    old.write_text("yesterday")
    for report in (old, new):
        Observer(Settings(urls=("http://a",), report=report))._check_report()
    assert old.read_text() == "yesterday" and not new.exists()
