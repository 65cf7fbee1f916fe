"""Bursts of which the truth is known, because the fleet that is observed is a simulated one."""

import base64
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from kunserve_lab.bench.metrics import ttft_s
from kunserve_lab.compare.simulated.simulation import simulate
from kunserve_lab.compare.systems import SYSTEMS
from kunserve_lab.observer.episodes import what_if
from kunserve_lab.observer.episodes.aside import judge_here
from kunserve_lab.observer.episodes.episode import Episode
from kunserve_lab.observer.episodes.rebuild import rebuild
from kunserve_lab.observer.episodes.story import Cause, as_json, cause_of, comparison, sentence
from kunserve_lab.observer.episodes.what_if import (
    AS_IT_RAN,
    DROP,
    ENDLESS,
    FP8_KV,
    LEAST_LOAD,
    WAKE,
    Judged,
    distance,
    judge,
)
from kunserve_lab.observer.output.report import report_html
from kunserve_lab.observer.readings.histogram import Histogram
from kunserve_lab.observer.session import Session
from kunserve_lab.observer.settings import Made
from tests.lab.observer.fake_fleet import START_S, FakeFleet, fleet


class Watched:
    """A fleet, what was seen of it, and its greatest episode judged."""

    def __init__(self, seen: FakeFleet) -> None:
        self.fleet = seen
        self.session = Session(Made(device="a800"), 1.0)
        self.episodes: list[Episode] = []
        for second in range(seen.num_seconds):
            _, episode = self.session.feed(seen.readings(second), START_S + second)
            self.episodes += [] if episode is None else [episode]
        last = self.session.close()
        self.episodes += [] if last is None else [last]

    @property
    def greatest(self) -> Episode:
        return max(self.episodes, key=lambda one: one.end_s - one.begin_s)

    def judge(self) -> Judged:
        session = self.session
        return judge(self.greatest, *session.make_of(self.greatest), session.made, most_draws=1)


@pytest.fixture(scope="module")
def short_of_memory() -> Watched:
    return Watched(fleet(1.6))


@pytest.fixture(scope="module")
def memory_judged(short_of_memory: Watched) -> Judged:
    return short_of_memory.judge()


@pytest.fixture(scope="module")
def short_of_compute() -> Watched:
    return Watched(fleet(2.2, blocks=15_000, tokens=(3000, 20), burst_s=10.0))


def test_memory_is_said_where_memory_was_short(memory_judged: Judged) -> None:
    assert cause_of(memory_judged) is Cause.MEMORY
    text = sentence(memory_judged)
    assert "memory was short on 2 of 2 replicas, compute was not; a drop would have" in text
    found = memory_judged.outcomes
    before, after = found[AS_IT_RAN].ttft_p99_s, found[DROP].ttft_p99_s
    said = re.search(r"P99 TTFT from about ([\d.]+) to ([\d.]+) s, and (raised|lowered|left)", text)
    assert said is not None
    assert float(said[1]) == pytest.approx(before, rel=0.1)
    assert float(said[2]) == pytest.approx(after, rel=0.1)
    assert before > 1.5 * after
    assert found[ENDLESS].ttft_p99_s < before
    assert found[FP8_KV].ttft_p99_s < before
    assert found[WAKE].num_woken > 0


def test_what_is_foretold_is_what_happens(short_of_memory: Watched, memory_judged: Judged) -> None:
    """As it ran, and with drops on the requests that really came."""
    seen, episode = short_of_memory.fleet, memory_judged.episode
    begin_s, end_s = episode.begin_s - START_S, episode.end_s - START_S
    ran = [one for replica in seen.replicas for one in replica.result.run.records]
    dropped = simulate(SYSTEMS["drop"], seen.scenario).run.records
    for way, records in ((AS_IT_RAN, ran), (DROP, dropped)):
        during = [ttft_s(one) or 0.0 for one in records if begin_s <= one.sent_s <= end_s]
        found = memory_judged.outcomes[way]
        for percentile, foretold in ((50, found.ttft_p50_s), (99, found.ttft_p99_s)):
            truth = float(np.percentile(during, percentile))
            assert foretold == pytest.approx(truth, rel=0.4), (way, percentile)


def test_draws_are_as_near_as_their_first_tokens() -> None:
    counted = Histogram((1.0, 2.0, 4.0), (5.0, 3.0, 2.0, 0.0), 18.0)
    assert distance(counted, [0.8] * 6 + [3.3] * 4) == pytest.approx(0.0)
    assert distance(counted, [1.8] * 10) == pytest.approx(np.log(1.8) + 2 * np.log(2 / 1.8))
    assert distance(counted, [8.0] * 10) > distance(counted, [3.0] * 10) > 1.0
    assert distance(None, [1.0]) == distance(counted, []) == 0.0, "nothing to go by"


def test_the_nearest_draws_are_taken(
    short_of_memory: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a distance that prefers late first tokens, late ones come out, and the reverse."""
    monkeypatch.setattr(what_if, "_ways", lambda *_: {})
    monkeypatch.setattr(what_if, "TRIED", 3)
    found = []
    for sign in (-1.0, 1.0):
        monkeypatch.setattr(what_if, "distance", lambda _, ttfts, by=sign: by * sum(ttfts))
        found.append(short_of_memory.judge().outcomes[AS_IT_RAN].ttft_p50_s)
    assert found[0] > found[1]


def test_replicas_cache_prefixes_as_they_say(short_of_memory: Watched) -> None:
    session, episode = short_of_memory.session, short_of_memory.greatest
    profile, _ = session.make_of(episode)
    workload = rebuild(episode, profile.max_model_len).workload
    for caches in (True, False):
        changes = tuple(
            replace(one, after=replace(one.after, caches_prefixes=caches))
            for one in episode.changes
        )
        said = replace(episode, changes=changes)
        made = what_if._scenario(profile, workload, said, session.made)
        assert made.scheduler.enable_prefix_caching is caches


def test_step_times_are_found_again(short_of_memory: Watched) -> None:
    """The fleet is its preset: both factors are about one."""
    _, factors = short_of_memory.session.make_of(short_of_memory.greatest)
    assert factors.num_windows >= 5
    assert factors.decode == pytest.approx(1.0, abs=0.15)
    assert factors.prompt == pytest.approx(1.0, abs=0.25)


def test_all_who_came_are_rebuilt(short_of_memory: Watched) -> None:
    seen, episode = short_of_memory.fleet, short_of_memory.greatest
    rebuilt = rebuild(episode, 100_000)
    came = [moment for moment in seen.scenario.workload.arrival_s
            if moment <= episode.changes[-1].after.time_s - START_S]  # fmt: skip
    first_s = episode.changes[0].before.time_s - START_S
    num_before = sum(moment < first_s for moment in came)
    late = 5  # the gauges of a page are a little older than its counters
    assert len(came) - num_before - late <= len(rebuilt.workload) <= len(came) + late
    assert set(rebuilt.replicas) == {0, 1}
    mean = np.mean(rebuilt.workload.input_tokens)
    assert mean == pytest.approx(np.mean(seen.scenario.workload.input_tokens), rel=0.15)


def test_the_monitor_would_have_dropped(short_of_memory: Watched) -> None:
    last = short_of_memory.session.history[-1].view
    assert last.drops.num_drops >= 1
    assert last.drops.num_requests > 0
    assert last.drops.wait_s > 0


def test_compute_is_said_where_compute_was_short(short_of_compute: Watched) -> None:
    judged = short_of_compute.judge()
    assert cause_of(judged) is Cause.COMPUTE
    assert "compute was short: more replicas, not drops" in sentence(judged)
    assert not short_of_compute.greatest.memory_s
    assert short_of_compute.greatest.compute_s
    ran = judged.outcomes[AS_IT_RAN]
    for times, words in (
        (0.99, "taken P99 TTFT only from about"),
        (1.0, "not have lowered P99 TTFT"),
    ):
        endless = replace(ran, ttft_p99_s=times * ran.ttft_p99_s)
        hardly = replace(judged, outcomes={AS_IT_RAN: ran, LEAST_LOAD: ran, ENDLESS: endless})
        assert f"even endless memory would {'have ' * (times < 1)}{words}" in sentence(hardly)


def test_notes_compare_and_say_how_far_to_trust_them(memory_judged: Judged) -> None:
    text = " ".join(comparison(memory_judged))
    for word in (
        "least-load dispatch alone",
        "fp8 KV",
        "sleeping replica",
        "By the map",
        "measured",
    ):
        assert word in text
    values = as_json(memory_judged)
    assert values["cause"] == "memory"
    assert values["sentence"] == sentence(memory_judged)


def test_nothing_is_made_of_a_quiet_fleet() -> None:
    quiet = Watched(fleet(0.5, burst_s=5.0))
    assert not quiet.episodes
    assert quiet.session.history[-1].view.drops.num_drops == 0


def test_what_cannot_be_simulated_is_said(short_of_memory: Watched) -> None:
    session, episode = short_of_memory.session, short_of_memory.greatest
    nothing = replace(episode, changes=())
    judged = judge_here((nothing, *session.make_of(episode), session.made))
    assert cause_of(judged) is Cause.UNKNOWN
    assert "not known" in sentence(judged)
    assert comparison(judged) == []


def test_the_report_opens_and_has_plots(short_of_memory: Watched, memory_judged: Judged) -> None:
    page = report_html(short_of_memory.session.history, [memory_judged], [("read from", "a<b")])
    seen = Seen()
    seen.feed(page)
    seen.close()
    assert seen.opened == ["h1", "h2", "h2"] and not seen.unclosed
    assert len(seen.images) == 2
    for image in seen.images:
        assert image.startswith("data:image/png;base64,")
        assert base64.b64decode(image.partition(",")[2]).startswith(b"\x89PNG")
    text = " ".join(seen.texts)
    assert sentence(memory_judged) in text
    assert "1 short of memory, and a drop would have helped" in text
    assert "a<b" in text
    for way in memory_judged.outcomes:
        assert way in text


class Seen(HTMLParser):
    """What a browser finds."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.unclosed: list[str] = []
        self.images: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("h1", "h2"):
            self.opened.append(tag)
        if tag in ("title", "table", "tr", "td", "th", "p", "h1", "h2", "style"):
            self.unclosed.append(tag)
        if tag == "img":
            self.images.append(dict(attrs)["src"] or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.unclosed.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
