"""Times single batches on a body, with hand-made plans: no scheduler, no neighbours."""

import time
from typing import NamedTuple, Protocol

import numpy as np
import torch

from kunserve.control.instance.body import StepWork
from kunserve.core.ids import GroupId, RequestId, StepId
from kunserve.core.layout import LayerRange
from kunserve.core.request import SamplingParams
from kunserve.core.step import Chunk, SequenceStart, StepPlan
from kunserve.core.tokens import NO_TOKENS
from kunserve.engine.body import EngineBody
from kunserve_lab.profile.shapes import BatchShape

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class Reading(NamedTuple):
    """One execution of a batch."""

    seconds: float
    """By the profile's clock: what it costs."""
    wall_s: float
    """How long it took, among neighbours."""


class Clock(Protocol):
    """What a batch costs, by its own measure."""

    name: str

    def begin(self) -> None:
        """A batch begins."""
        ...

    def seconds(self) -> float:
        """Since ``begin``; the batch has ended."""
        ...


class HostClock:
    """The thread's CPU time, which neighbours disturb little; with several threads wall time."""

    def __init__(self, num_threads: int) -> None:
        self._now = time.thread_time if num_threads == 1 else time.perf_counter
        self.name = "CPU time of the thread" if num_threads == 1 else "wall time"
        self._began = 0.0

    def begin(self) -> None:
        """See ``Clock``."""
        self._began = self._now()

    def seconds(self) -> float:
        """See ``Clock``."""
        return self._now() - self._began


class DeviceClock:
    """CUDA events around the batch, in the stream that computes it."""

    name = "CUDA events"

    def __init__(self) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """See ``Clock``."""
        self._events[0].record()

    def seconds(self) -> float:
        """See ``Clock``."""
        begin, end = self._events
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class Stopwatch:
    """Owner of nothing: the body's KV memory is overwritten."""

    def __init__(self, body: EngineBody, clock: Clock) -> None:
        self._body = body
        self._clock = clock
        self.clock = clock.name

    def measure(self, shape: BatchShape) -> Reading:
        """Run the batch once."""
        work = self._work(shape)
        began_s = time.perf_counter()
        self._clock.begin()
        self._body.execute(work, None)
        reading = Reading(self._clock.seconds(), time.perf_counter() - began_s)
        for start in work.plan.started:
            self._body.forget(start.request_id)
        return reading

    def _work(self, shape: BatchShape) -> StepWork:
        ids = [RequestId(str(i)) for i in range(len(shape.lengths))]
        first_sampling = len(ids) - shape.num_samples
        chunks = tuple(
            Chunk(request_id, prefix, length, int(i >= first_sampling))
            for i, (request_id, prefix, length) in enumerate(
                zip(ids, shape.prefixes, shape.lengths, strict=True)
            )
        )
        started = tuple(
            SequenceStart(chunk.request_id, GREEDY, chunk.start + chunk.num_tokens, NO_TOKENS)
            for chunk in chunks
        )
        num_layers = self._body.spec.num_layers
        return StepWork(
            plan=StepPlan(GroupId(0), StepId(0), (), started, chunks),
            layers=LayerRange(0, num_layers),
            is_first=True,
            is_last=True,
            token_ids=np.arange(shape.num_tokens, dtype=np.int32) % self._body.model.vocab_size,
            tables=self._tables(shape),
            rows=np.arange(len(ids), dtype=np.int32),
        )

    def _tables(self, shape: BatchShape) -> np.ndarray:
        spec = self._body.spec
        counts = [
            -(-(prefix + length) // spec.block_size)
            for prefix, length in zip(shape.prefixes, shape.lengths, strict=True)
        ]
        assert sum(counts) <= spec.kv_units // spec.num_layers, (shape, spec)
        tables = np.zeros((len(counts), max(counts)), dtype=np.int32)
        first = 0
        for row, count in zip(tables, counts, strict=True):
            row[:count] = np.arange(first, first + count) * spec.num_layers
            first += count
        return tables
