"""Watches until it is told to stop, or reads what was recorded; says what it sees."""

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import aiohttp

from kunserve.core.errors import ConfigError
from kunserve_lab.observer.episodes.aside import Judging, JudgingAll, Work
from kunserve_lab.observer.episodes.episode import Episode
from kunserve_lab.observer.episodes.what_if import Judged
from kunserve_lab.observer.output.endpoint import Endpoint
from kunserve_lab.observer.output.report import report_html, summary, write_report
from kunserve_lab.observer.output.show import Shower, shower_of
from kunserve_lab.observer.readings.clock import now_s
from kunserve_lab.observer.readings.page import Reading
from kunserve_lab.observer.readings.prometheus import read_prometheus, seconds_of
from kunserve_lab.observer.readings.record import Record, Recorder, by_moment
from kunserve_lab.observer.readings.scrape import Scraper
from kunserve_lab.observer.session import Session
from kunserve_lab.observer.settings import Settings

FIRST_S = 15.0
"""In which the first server must have answered."""
MOST_EPISODES = 500
"""That a report tells of; of more, the newest."""
MOST_ON_PAGE = 10
"""That the live page shows: it is drawn again and again."""


class Observer:
    """One run of ``kunserve observe``."""

    def __init__(self, settings: Settings, shower: Shower | None = None) -> None:
        self.settings = settings
        self.judged: list[Judged] = []
        self._shower = shower or shower_of(settings.as_json, sys.stdout)
        self._session = Session(settings.made, settings.period_s)
        self._endpoint: Endpoint | None = None
        self._errors: dict[str, str] = {}

    # A record or a Prometheus server

    def replay(self) -> None:
        """Everything that a record or a Prometheus server has, at once. Raises ConfigError."""
        settings = self.settings
        self._check_report()
        if settings.file is not None:
            record = Record(settings.file)
            readings, period_s = iter(record), record.period_s
            if record.num_left_out:
                lines = f"{record.num_left_out} line{'s' if record.num_left_out > 1 else ''}"
                print(f"{settings.file}: {lines} left out, cut or broken", file=sys.stderr)
        else:
            assert settings.prometheus is not None
            since_s, period_s = seconds_of(settings.since), settings.step_s
            readings = read_prometheus(
                settings.prometheus, since_s, period_s, time.time(), settings.selector
            )
        self._session = Session(settings.made, period_s)
        judging = JudgingAll(self._tell)
        with contextlib.ExitStack() as last:
            last.callback(self._write_report)
            last.callback(self._shower.close)
            last.callback(judging.close)
            self._replay(readings, period_s, judging)
            judging.finish()
        self._conclude()

    def _replay(self, readings: Iterable[Reading], period_s: float, judging: JudgingAll) -> None:
        for group in by_moment(readings, period_s):
            view, episode = self._session.feed(group, max(one.time_s for one in group))
            if self.settings.as_json:
                self._shower.show(view, {})
            if episode is not None:
                judging.give(self._work(episode))
        last = self._session.close()
        if last is not None:
            judging.give(self._work(last))

    def _work(self, episode: Episode) -> Work:
        return (episode, *self._session.make_of(episode), self.settings.made)

    # Live

    async def watch(self, stop: asyncio.Event | None = None) -> None:
        """Look at the servers until the time is over or ``stop`` is set. Raises ConfigError."""
        settings = self.settings
        self._check_report()
        stop = stop or _stop_at_signals()
        scraper = Scraper(settings.urls, settings.period_s, settings.api_key)
        judging = Judging(self._tell)
        recorder = None if settings.record is None else Recorder(settings.record)
        # Whatever goes wrong, and also with one of these: all of them, the last one first.
        async with contextlib.AsyncExitStack() as last:
            last.callback(self._write_report)
            if recorder is not None:
                last.callback(recorder.close)
            last.push_async_callback(self._close_endpoint)
            last.callback(self._shower.close)
            last.push_async_callback(judging.finish)
            session = await last.enter_async_context(aiohttp.ClientSession())
            last.push_async_callback(scraper.stop)
            await self._open_endpoint()
            scraper.start(session)
            await _first_answer(scraper, stop)
            judging.start()
            await self._look_on(scraper, judging, recorder, stop)
        self._conclude()

    async def _look_on(
        self, scraper: Scraper, judging: Judging, recorder: Recorder | None, stop: asyncio.Event
    ) -> None:
        settings, session = self.settings, self._session
        end_s = float("inf") if settings.duration_s is None else settings.duration_s
        began_s = time.monotonic()
        while not stop.is_set() and time.monotonic() - began_s < end_s:
            readings = scraper.take()
            if recorder is not None and readings:
                recorder.write(readings)
            view, episode = session.feed(readings, now_s())
            self._errors = scraper.errors | session.refused
            if recorder is not None and recorder.error is not None:
                self._errors["--record"] = recorder.error
            self._shower.show(view, self._errors)
            if self._endpoint is not None:
                self._endpoint.show(view)
            self._give(judging, episode)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), settings.period_s)
        self._give(judging, session.close())

    def _give(self, judging: Judging, episode: Episode | None) -> None:
        if episode is not None:
            judging.give(self._work(episode))

    async def _open_endpoint(self) -> None:
        if self.settings.port is not None:
            self._endpoint = Endpoint(self.page)
            port = await self._endpoint.start(self.settings.host, self.settings.port)
            print(f"http://{self.settings.host}:{port}/ and /metrics", file=sys.stderr)

    async def _close_endpoint(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.stop()

    # What both do

    def page(self) -> str:
        """The fleet now, and the report so far: its newest episodes."""
        points, judged = tuple(self._session.history), tuple(self.judged)
        return report_html(points, judged, self._conditions(), self._errors, MOST_ON_PAGE)

    def _tell(self, judged: Judged) -> None:
        self.judged = [*self.judged, judged][-MOST_EPISODES:]
        self._shower.tell(judged)
        if self._endpoint is not None:
            self._endpoint.metrics.tell(judged)

    def _conclude(self) -> None:
        """The whole time in a sentence."""
        if not self.settings.as_json:
            print(summary(self._session.history, self.judged))

    def _write_report(self) -> None:
        """Where one is asked for and something was seen, also if the watching ended by an error."""
        history = tuple(self._session.history)
        if self.settings.report is not None and history:
            with _told(self.settings.report):
                write_report(self.settings.report, history, self.judged, self._conditions())

    def _check_report(self) -> None:
        """Before a day of watching, not after it. Raises ConfigError."""
        if self.settings.report is not None:
            is_new = not self.settings.report.exists()
            with _told(self.settings.report), self.settings.report.open("ab"):
                pass
            if is_new:  # else one that is killed leaves an empty report
                self.settings.report.unlink(missing_ok=True)

    def _conditions(self) -> list[tuple[str, str]]:
        made, factors = self.settings.made, self._session.factors
        source = ", ".join(self.settings.urls) or self.settings.prometheus or self.settings.file
        costs = f"profile {made.profile}" if made.profile else f"preset {made.device}"
        return [
            ("read from", str(source)),
            ("replicas", ", ".join(self._session.replicas)),
            ("model", made.model or "as the servers call it"),
            ("step times", f"{costs}; decodes x{factors.decode:.2f}, prompts x{factors.prompt:.2f}"
             f" by {factors.num_windows} windows of the fleet"),
            ("limits of a step", f"{made.max_num_batched_tokens} tokens, {made.max_num_seqs} "
             "requests"),
        ]  # fmt: skip


@contextlib.contextmanager
def _told(report: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--report {report}: {error.strerror}") from None


async def _first_answer(scraper: Scraper, stop: asyncio.Event) -> None:
    """Wait until one server has answered. Raises ConfigError, which tells of each why it did not.

    A fleet of which one is down is watched; one of which none can be read is a mistake.
    """
    deadline_s = time.monotonic() + FIRST_S
    while not stop.is_set():
        if any(target.answered for target in scraper.targets):
            return
        if all(target.error for target in scraper.targets) or time.monotonic() > deadline_s:
            errors = [target.error or "no answer yet" for target in scraper.targets]
            raise ConfigError("; ".join(errors))
        await asyncio.sleep(0.05)


def _stop_at_signals() -> asyncio.Event:
    """A second ^C ends the process as if nobody listened."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def told() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, told)
    return stop
