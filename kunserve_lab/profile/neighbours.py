"""The other instances of the machine, computing while one is measured.

Instances of one machine share its memory bandwidth, caches and clock rate: a step takes longer
beside others. Without neighbours a profile knows the machine idle, as no burst ever finds it. They
do what serving instances do: mostly decode few sequences at a time, which streams the weights and
leaves others the least bandwidth, and between that run prompts.
"""

import contextlib
import itertools
import multiprocessing
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event

from kunserve.core.errors import ConfigError
from kunserve_lab.profile.run import BodySettings, limits_of, open_body
from kunserve_lab.profile.shapes import draw_shapes
from kunserve_lab.profile.stopwatch import Stopwatch

START_S = 120.0
_LOOK_S = 1.0
"""While one starts, it is looked for so often whether it has ended instead."""
_SETTLE_S = 1.0
"""After this much of a rest every batch that was under way has ended."""
_REST_STEP_S = 0.01
STOP_S = 10.0
_BATCHES_PER_REGION = 8
_MOST_DECODES = 16
_DECODE_SHARE = 0.8
"""Of an instance's busy time, steps that only decode (`benchmarks.brain.prediction` finds them)."""


class Neighbours:
    """The processes that compute, or rest."""

    def __init__(self, rest: Event, processes: Sequence[BaseProcess]) -> None:
        self._rest = rest
        self._processes = processes

    def check(self) -> None:
        """Raise ConfigError if one has ended.

        Without it the machine is idler than it is when it serves, and nothing else would tell.
        """
        for process in self._processes:
            if not process.is_alive():
                raise ConfigError(
                    f"an instance that computes beside the measured one ended (exit code "
                    f"{process.exitcode}): is there memory for all of --num-instances?"
                )

    def let_rest(self, rests: bool) -> None:
        """Stand still, or go on. Returns once they do."""
        if not self._processes or rests == self._rest.is_set():
            return
        if rests:
            self._rest.set()
        else:
            self._rest.clear()
        time.sleep(_SETTLE_S)


@contextlib.contextmanager
def neighbours(count: int, settings: BodySettings) -> Iterator[Neighbours]:
    """Within, ``count`` more bodies compute, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ready, stop, rest = [context.Event() for _ in range(count)], context.Event(), context.Event()
    processes = [
        context.Process(
            target=_compute,
            args=(settings, seed, event, stop, rest),
            daemon=True,
        )
        for seed, event in enumerate(ready)
    ]
    try:
        with _no_interrupts():
            for process in processes:
                process.start()
        found = Neighbours(rest, processes)
        for event in ready:
            _await_start(event, found)
        yield found
    finally:
        stop.set()
        for process in processes:
            process.join(STOP_S)
            process.kill()


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """What is started within never hears Ctrl-C, which a terminal sends to all: it is stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _await_start(ready: Event, others: Neighbours) -> None:
    deadline_s = time.monotonic() + START_S
    while not ready.wait(_LOOK_S):
        others.check()
        if time.monotonic() >= deadline_s:
            raise ConfigError(
                f"an instance that computes beside the measured one did not start in {START_S:g} s:"
                " give a smaller --num-instances"
            )


def _compute(
    settings: BodySettings,
    seed: int,
    ready: Event,
    stop: Event,
    rest: Event,
) -> None:
    body = open_body(settings, number=seed + 1)
    try:
        limits = limits_of(body, max_batch_tokens=256, max_decodes=_MOST_DECODES)
        stopwatch = Stopwatch(body, settings.clock)
        shapes = draw_shapes(_BATCHES_PER_REGION, limits, seed)
        decodes = itertools.cycle([shape for shape in shapes if shape.region == "decode"])
        prompts = itertools.cycle([shape for shape in shapes if shape.region != "decode"])
        stopwatch.measure(shapes[0])
        ready.set()
        decoding_s = others_s = 0.0
        while not stop.is_set():
            if rest.is_set():
                time.sleep(_REST_STEP_S)
                continue
            is_decode = decoding_s * (1.0 - _DECODE_SHARE) < others_s * _DECODE_SHARE
            began_s = time.monotonic()
            stopwatch.measure(next(decodes if is_decode else prompts))
            took_s = time.monotonic() - began_s
            decoding_s, others_s = (
                (decoding_s + took_s, others_s) if is_decode else (decoding_s, others_s + took_s)
            )
    finally:
        body.close()
