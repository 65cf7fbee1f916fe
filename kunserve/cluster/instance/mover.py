"""Layers from disk beside the loop: the bulk mover of an instance fills weights from there too."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.core.transfer import LayerLoad
from kunserve.transport.bulk.mover import BulkMover
from kunserve.transport.wire.wakeup import Wakeup


@dataclass(frozen=True, slots=True)
class Loaded:
    """The end of one load."""

    what: LayerLoad
    ok: bool = True


class LayerLoader:
    """Fills mapped layers from disk, one at a time, in threads of their own.

    The memory of a layer is the loader's until its load is in ``completed``, or ``cancel`` has
    returned.
    """

    def __init__(self, load: Callable[[LayerRange], None]) -> None:
        """``load`` fills mapped layers; it is called by one thread at a time."""
        self._load = load
        self._lock = threading.Lock()
        """Held while a layer is being filled."""
        self._is_cancelled = threading.Event()
        self._completed: list[Loaded] = []
        self._failure: BaseException | None = None
        self.wakeup = Wakeup()
        """Set when ``completed`` may have something."""

    def start(self, layers: LayerRange) -> None:
        """Begin to fill consecutive layers."""
        arguments = (LayerLoad(layers), self._is_cancelled)
        threading.Thread(target=self._run, args=arguments, name="disk", daemon=True).start()

    def _run(self, what: LayerLoad, is_cancelled: threading.Event) -> None:
        try:
            for layer in range(*what.layers):
                with self._lock:
                    if is_cancelled.is_set():
                        return
                    self._load(LayerRange(layer, layer + 1))
            with self._lock:
                if not is_cancelled.is_set():
                    self._completed.append(Loaded(what))
        except BaseException as error:
            self._failure = error
        self.wakeup.set()

    def completed(self) -> list[Loaded]:
        """Loads that ended since the last call. Raises if one has failed."""
        self.wakeup.clear()
        if self._failure is not None:
            raise RuntimeError("layers cannot be loaded") from self._failure
        with self._lock:
            completed, self._completed = self._completed, []
        return completed

    def cancel(self) -> None:
        """Once this returns nothing is filled any more, nor will the end of a load be told."""
        self._is_cancelled.set()
        self._is_cancelled = threading.Event()
        with self._lock:  # after the layer that is being filled
            self._completed.clear()


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

    def reset(self) -> None:
        """See ``control.instance.body.Mover``."""
        self.loader.cancel()
        super().reset()
