"""``pytest --forks 4``: tests shared by forks of the process that collected them.

Collecting imports torch, transformers and every test: ten seconds of processor time, which each
process of pytest-xdist spends anew. Each fork takes whole modules, so that a module's fixtures
are mostly set up once. Who has none left takes half of what another one has before it.
"""

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import pytest

Chunk = list[int]
"""Tests, by their places in the session, that one process runs one after the other."""
_AHEAD = 2
"""Chunks that a process has, so that it does not wait for the next one."""
_DIED = "a process of the tests ended with status {status} {where} this test"
_LEFT_BEHIND = Path(__file__).with_name("left_behind.py")
_PR_SET_PDEATHSIG = 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, metavar="N", help=__doc__)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported is kept, so nobody looks for garbage in it meanwhile: that takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    num_forks = session.config.getoption("forks")
    if not num_forks or session.config.option.collectonly or session.testsfailed:
        return None
    Forks(session, num_forks).run()
    return True


def modules_of(items: list[pytest.Item]) -> Iterator[deque[Chunk]]:
    """Of each module its chunks. Tests that share a fixture of their module stay together: they
    come last, those of the first folders behind all, because forks that begin there are to have
    done with what cannot be parted before others have nothing left. Behind even these come single
    tests that are marked as ``dear``.
    """
    dear = [place for place, item in enumerate(items) if item.get_closest_marker("dear")]
    others = [place for place in range(len(items)) if place not in dear]
    whole = []
    for _, places in groupby(others, lambda place: items[place].path):
        of_module = list(places)
        if any(_shares(items[place]) for place in of_module):
            whole.append(deque([of_module]))
        else:
            yield deque([place] for place in of_module)
    yield from reversed(whole)
    yield from (deque([[place]]) for place in dear)


def _shares(item: pytest.Item) -> bool:
    found = getattr(item, "_fixtureinfo", None)
    fixtures = found.name2fixturedefs.values() if found else ()
    return any(one.scope in ("class", "module", "package") for many in fixtures for one in many)


@dataclass(eq=False)
class Fork:
    """One process, as the one that collected sees it."""

    pid: int
    orders: Connection
    words: Connection
    waiting: deque[Chunk] = field(default_factory=deque)
    """Chunks that it may yet be given."""
    given: deque[Chunk] = field(default_factory=deque)
    """Those it has, the first one under way."""
    done: set[int] = field(default_factory=set)
    """Tests of the first one whose end it has told."""
    last: int | None = None
    """The test that it ended last."""
    reports: list[pytest.TestReport] = field(default_factory=list)
    """Of the test under way. They are handed on together, else tests' words would be mixed."""
    broken: str = ""
    """What its own code has raised."""

    def left(self) -> list[int]:
        """Tests that it was given and has not ended, the one under way first."""
        return [place for chunk in self.given for place in chunk if place not in self.done]

    def tell(self, chunk: Chunk | None) -> None:
        """None is its end. That it has died is seen where it is heard."""
        with contextlib.suppress(BrokenPipeError):
            self.orders.send(chunk)


class Forks:
    """Gives tests to processes, and hands on what they report."""

    def __init__(self, session: pytest.Session, num_forks: int) -> None:
        self._session, self._hook = session, session.config.hook
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._modules = deque(modules_of(session.items))
        self._forks: list[Fork] = []
        self._num_forks, self._num_made = num_forks, 0
        self._is_whole, self._is_interrupted = True, False

    def run(self) -> None:
        gc.collect()
        gc.freeze()  # what was imported is neither looked at nor copied again
        self._end = end_with_this_process()
        handler = signal.signal(signal.SIGINT, self._interrupt)
        try:
            for _ in range(self._num_forks):
                with self._in_one_piece():
                    self._make()
            while self._forks:
                for words in wait([fork.words for fork in self._forks]):
                    with self._in_one_piece():
                        self._hear(next(fork for fork in self._forks if fork.words is words))
                    if self._session.shouldfail:
                        raise self._session.Failed(self._session.shouldfail)
                    if self._session.shouldstop:
                        raise self._session.Interrupted(self._session.shouldstop)
        except KeyboardInterrupt:
            if self._is_whole:
                self._hear_the_rest()
            running = [fork.left()[0] for fork in self._forks if fork.left()]
            terminal = self._session.config.pluginmanager.getplugin("terminalreporter")
            terminal.write_line("\ninterrupted; these ran, and are ended with all they started:")
            for place in running:
                terminal.write_line(f"  {self._session.items[place].nodeid}")
            raise
        finally:
            for fork in self._forks:
                os.kill(fork.pid, signal.SIGKILL)
                os.waitpid(fork.pid, 0)
            self._end.communicate()  # whatever they have left behind is ended
            signal.signal(signal.SIGINT, handler)

    def _interrupt(self, signum: int, frame: object) -> None:
        """Half a word, or a process that nobody knows of yet, would hide what runs: the first
        interrupt waits for the whole. The second one does not.
        """
        if self._is_whole or self._is_interrupted:
            raise KeyboardInterrupt
        self._is_interrupted = True

    @contextlib.contextmanager
    def _in_one_piece(self) -> Iterator[None]:
        self._is_whole = False
        yield
        self._is_whole = True
        if self._is_interrupted:
            raise KeyboardInterrupt

    def _hear_the_rest(self) -> None:
        """What was said until now, so that what runs is known. Nobody begins anything else."""
        self._modules.clear()
        for fork in self._forks:
            fork.waiting.clear()
        for fork in tuple(self._forks):
            while fork in self._forks and fork.words.poll():
                self._hear(fork)

    def _make(self) -> None:
        (orders, to_do), (said, words) = Pipe(duplex=False), Pipe(duplex=False)
        self._num_made += 1
        parent_pid = os.getpid()
        sys.stdout.flush()
        with warnings.catch_warnings(action="ignore"):  # of threads: numpy's are used to forks
            pid = os.fork()
        if not pid:
            for fork in self._forks:
                fork.orders.close()
                fork.words.close()
            to_do.close()
            said.close()
            assert self._end.stdin is not None
            self._end.stdin.close()
            die_with(parent_pid)
            work(self._session, orders, words, self._num_made)
        orders.close()
        words.close()
        fork = Fork(pid, to_do, said)
        self._forks.append(fork)
        self._give(fork)

    def _give(self, fork: Fork) -> None:
        """Whole modules: the first fork from the front, where tests wait much, others from the
        back. Then chunks of another one.
        """
        while len(fork.given) < _AHEAD:
            if not fork.waiting and self._modules:
                is_first = fork is self._forks[0]
                fork.waiting = self._modules.popleft() if is_first else self._modules.pop()
            if not fork.waiting:
                longest = max(self._forks, key=lambda one: len(one.waiting))
                for _ in range((len(longest.waiting) + 1) // 2):
                    fork.waiting.appendleft(longest.waiting.pop())
            if not fork.waiting:
                break
            fork.given.append(fork.waiting.popleft())
            fork.tell(fork.given[-1])
        if not fork.given:
            fork.tell(None)

    def _hear(self, fork: Fork) -> None:
        try:
            word = fork.words.recv()
        except EOFError:
            self._bury(fork)
            return
        match word:
            case ("report", report):
                config = self._session.config
                made = self._hook.pytest_report_from_serializable(config=config, data=report)
                fork.reports.append(made)
            case ("done", place):
                fork.done.add(place)
                fork.last = place
                self._hand_on(fork, place)
            case ("broken", text):
                fork.broken = text
            case "next":
                fork.given.popleft()
                fork.done.clear()
                self._give(fork)
            case "over":  # the pipe may stay open, if a test has left a fork of it behind
                self._bury(fork)

    def _hand_on(self, fork: Fork, place: int) -> None:
        """All that was said of a test, at once."""
        item, reports = self._session.items[place], fork.reports
        fork.reports = []
        self._hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            self._hook.pytest_runtest_logreport(report=report)
        self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _bury(self, fork: Fork) -> None:
        """It has ended. If it had tests left, the first one has failed, and others run them. If
        it had none left, what it tore down behind its last one has failed.
        """
        fork.orders.close()
        fork.words.close()
        self._forks.remove(fork)
        _, status = os.waitpid(fork.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        left = fork.left()
        if not left and not code:
            return
        place = left[0] if left else fork.last
        assert place is not None, f"a process of the tests has not begun: {code}\n{fork.broken}"
        item = self._session.items[place]
        word = _DIED.format(status=code, where="in" if left else "behind") + fork.broken
        failed = pytest.TestReport(item.nodeid, item.location, {}, "failed", word, "call")
        fork.reports.append(failed)
        self._hand_on(fork, place)
        rest = deque([*([left[1:]] if left[1:] else []), *fork.waiting])
        if rest:
            self._modules.appendleft(rest)
        self._make()


def end_with_this_process() -> subprocess.Popen[bytes]:
    """A process that ends whatever this one's tests started, as soon as this one is gone."""
    mark = f"PYTEST_FORKS_OF_{os.getpid()}"
    os.environ[mark] = "1"
    return subprocess.Popen(
        [sys.executable, "-S", str(_LEFT_BEHIND), mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def die_with(parent_pid: int) -> None:
    """Be killed when the process that forked this one ends, however that comes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def work(session: pytest.Session, orders: Connection, words: Connection, number: int) -> None:
    """Be a process that runs what it is given, and ends when nothing is left."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        be_alone(session.config, number)
        session.config.pluginmanager.register(Reporter(session.config, words))
        while (chunk := orders.recv()) is not None:
            run_chunk(session, chunk, words)
            words.send("next")
        session._setupstate.teardown_exact(None)
        status = 0
        words.send("over")
    except BaseException:
        with contextlib.suppress(OSError):
            words.send(("broken", "\n" + traceback.format_exc()))
    finally:
        os._exit(status)


def be_alone(config: pytest.Config, number: int) -> None:
    """Share neither what is captured, nor folders, nor a terminal with other processes."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    nowhere = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    config.pluginmanager.getplugin("terminalreporter")._tw._file = nowhere
    folders = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / f"fork-{number}"
    folders._basetemp.mkdir()


class Reporter:
    """Sends what the tests of this process say."""

    def __init__(self, config: pytest.Config, words: Connection) -> None:
        self._config, self._words = config, words

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        to_data = self._config.hook.pytest_report_to_serializable
        self._words.send(("report", to_data(config=self._config, report=report)))


def run_chunk(session: pytest.Session, chunk: Chunk, words: Connection) -> None:
    """Behind its last test all is torn down but what belongs to the session."""
    for place, next_place in zip(chunk, [*chunk[1:], None], strict=True):
        item = session.items[place]
        follower = Nobody(session) if next_place is None else session.items[next_place]
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=follower)
        words.send(("done", place))


@dataclass
class Nobody:
    """Stands for the test behind the last one of a chunk, which may be of any module."""

    session: pytest.Session

    def listchain(self) -> list[pytest.Session]:
        return [self.session]
