"""The other instances of the machine, computing while one is measured.

Instances of one machine share its memory bandwidth, caches and clock rate: a step takes longer
beside others. Without neighbours a profile knows the machine idle, as no burst ever finds it.
"""

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.synchronize import Event

from kunserve.core.config import ModelConfig
from kunserve.engine.profile.run import limits_of, open_body
from kunserve.engine.profile.shapes import draw_shapes
from kunserve.engine.profile.stopwatch import Stopwatch

START_S = 120.0
STOP_S = 10.0
_BATCHES_PER_REGION = 8


@contextlib.contextmanager
def neighbours(count: int, model: ModelConfig, block_size: int, num_threads: int) -> Iterator[None]:
    """Within, ``count`` more bodies run batches of all regions, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ready, stop = [context.Event() for _ in range(count)], context.Event()
    processes = [
        context.Process(
            target=_compute, args=(model, block_size, num_threads, seed, event, stop), daemon=True
        )
        for seed, event in enumerate(ready)
    ]
    try:
        for process in processes:
            process.start()
        for event in ready:
            if not event.wait(START_S):
                raise RuntimeError("a neighbour did not start")
        yield
    finally:
        stop.set()
        for process in processes:
            process.join(STOP_S)
            process.kill()


def _compute(
    model: ModelConfig, block_size: int, num_threads: int, seed: int, ready: Event, stop: Event
) -> None:
    body = open_body(model, block_size, num_threads)
    try:
        limits = limits_of(body, max_batch_tokens=256, max_decodes=64)
        stopwatch = Stopwatch(body, num_threads)
        shapes = draw_shapes(_BATCHES_PER_REGION, limits, seed)
        stopwatch.measure(shapes[0])
        ready.set()
        while True:
            for shape in shapes:
                if stop.is_set():
                    return
                stopwatch.measure(shape)
    finally:
        body.close()
