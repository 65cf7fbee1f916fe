"""Layers from disk beside the loop: the bulk mover of an instance fills weights from there too."""

import functools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kunserve.core.faults import MachineFailed
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.core.transfer import LayerLoad
from kunserve.transport.bulk.movable_memory import WriteGate
from kunserve.transport.bulk.mover import BulkMover
from kunserve.transport.wire.wakeup import Wakeup


@dataclass(frozen=True, slots=True)
class Loaded:
    """The end of one load."""

    what: LayerLoad
    ok: bool = True


class LoadCancelled(Exception):
    """Nobody wants these layers any more."""


@dataclass(slots=True)
class _Job:
    what: LayerLoad
    is_wanted: bool = True


class LayerLoader:
    """Fills mapped layers from disk, one after the other, in a thread of its own.

    The memory of a layer is the loader's until its load is in ``completed``, or ``cancel`` has
    returned. A read that hangs holds up later loads only.
    """

    def __init__(self, load: Callable[[LayerRange, WriteGate], None]) -> None:
        """``load`` fills mapped layers; all that it writes there passes the gate."""
        self._load = load
        self._lock = threading.Lock()
        """Of what is below. Held while bytes are written, and not while they are read."""
        self._jobs: deque[_Job] = deque()
        """The first is at work, wanted or not."""
        self._completed: list[Loaded] = []
        self._failure: BaseException | None = None
        self.num_bytes = 0
        """Written so far."""
        self.wakeup = Wakeup()
        """Set when ``completed`` may have something."""

    def start(self, layers: LayerRange) -> None:
        """Begin to fill consecutive layers."""
        with self._lock:
            self._jobs.append(_Job(LayerLoad(layers)))
            is_idle = len(self._jobs) == 1
        if is_idle:
            threading.Thread(target=self._run, name="disk", daemon=True).start()

    def _run(self) -> None:
        while True:
            job, failure = self._jobs[0], None
            gate = functools.partial(self._write, job)
            try:
                for layer in range(*job.what.layers):
                    self._load(LayerRange(layer, layer + 1), gate)
            except BaseException as error:
                failure = error
            with self._lock:
                if job.is_wanted and failure is None:
                    self._completed.append(Loaded(job.what))
                elif job.is_wanted:
                    self._failure = failure
                self._jobs.popleft()
                is_over = not self._jobs
            self.wakeup.set()
            if is_over:
                return

    def _write(self, job: _Job, num_bytes: int, write: Callable[[], None]) -> None:
        """A ``WriteGate``."""
        with self._lock:
            if not job.is_wanted:
                raise LoadCancelled
            write()
            self.num_bytes += num_bytes

    def completed(self) -> list[Loaded]:
        """Loads that ended since the last call. Raises MachineFailed if one has failed."""
        self.wakeup.clear()
        if self._failure is not None:
            raise MachineFailed("layers cannot be loaded") from self._failure
        with self._lock:
            completed, self._completed = self._completed, []
        return completed

    def cancel(self) -> None:
        """Once this returns nothing is written any more, nor will the end of a load be told.

        It waits for bytes that are being written, and for no disk.
        """
        with self._lock:
            for job in self._jobs:
                job.is_wanted = False
            while len(self._jobs) > 1:
                self._jobs.pop()
            self._completed.clear()
            self._failure = None


class InstanceMover(BulkMover):
    """A bulk mover that loads layers from disk as well."""

    loader: LayerLoader
    """Set once, before the instance's agent sees the mover."""

    def pull_layers(self, layers: LayerRange, src: InstanceId | None) -> None:
        """See ``control.instance.body.Mover``."""
        if src is None:
            self.loader.start(layers)
        else:
            super().pull_layers(layers, src)

    @property
    def num_bytes_taken(self) -> int:
        """See ``control.instance.body.Mover``."""
        return super().num_bytes_taken + self.loader.num_bytes

    def cancel_layers(self) -> None:
        """See ``control.instance.body.Mover``."""
        self.loader.cancel()
        super().cancel_layers()

    def reset(self) -> None:
        """See ``control.instance.body.Mover``."""
        self.loader.cancel()
        super().reset()
