"""A pipe from one device to one on another host: NCCL's, or gloo's between CPUs.

Both find each other by a store that the giving end opens on a free port of its host. Its names
begin with a token that only the links have told. What goes through the pipe is not encrypted.
"""

import contextlib
import enum
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

GIVES, TAKES = 0, 1
"""The ends of a pipe."""


class PipeBy(enum.StrEnum):
    """What carries it."""

    NCCL = "nccl"
    GLOO = "gloo"


class Place(NamedTuple):
    """Where the giving end waits for the other one."""

    host: str
    port: int
    token: str


class Under(Protocol):
    """Bytes on their way."""

    tensor: torch.Tensor
    """Of uint8, on the device."""

    @property
    def is_done(self) -> bool:
        """Whether it is there; or, where it is given, whether its memory may be written again.

        Never waits. Raises OSError if it will never be.
        """
        ...


class Pipe(Protocol):
    """What one end gives, the other takes in the same order and of the same sizes. One thread."""

    def give(self, tensor: torch.Tensor) -> Under:
        """Behind what computes it. Raises OSError."""
        ...

    def take(self, num_bytes: int) -> Under:
        """Into new memory, beside whatever is computed. Raises OSError."""
        ...

    def close(self) -> None:
        """Give up what is on its way."""
        ...


def open_store(host: str, patience_s: float) -> tuple[dist.Store, int]:
    """On this host, and its port. Raises OSError."""
    try:
        store = dist.TCPStore(
            host, 0, None, True, timedelta(seconds=patience_s), wait_for_workers=False
        )
    except RuntimeError as error:
        raise OSError(f"no store for a pipe: {error}") from error
    return store, store.port


def join_store(place: Place, patience_s: float) -> dist.Store:
    """The other host's. Raises OSError."""
    patience = timedelta(seconds=patience_s)
    try:
        return dist.TCPStore(place.host, place.port, None, False, patience, wait_for_workers=False)
    except RuntimeError as error:
        raise OSError(f"the store of a pipe is not there: {error}") from error


def open_pipe(
    by: PipeBy,
    store: dist.Store,
    token: str,
    end: int,
    host: str,
    device: torch.device,
    patience_s: float,
) -> Pipe:
    """Returns when both ends are there. Raises OSError if the other one does not come.

    Through gloo what waits longer than ``patience_s`` fails.
    """
    named = dist.PrefixStore(token, store)
    patience = timedelta(seconds=patience_s)
    named.set_timeout(patience)
    try:
        if by is PipeBy.NCCL:
            return NcclPipe(named, end, device, patience)
        return GlooPipe(named, end, host, patience)
    except RuntimeError as error:
        raise OSError(f"the ends of a pipe do not find each other: {error}") from error


class _Watched:
    """Gloo's, for which somebody has to wait."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.has_come = False
        self.failure: RuntimeError | None = None

    @property
    def is_done(self) -> bool:
        if self.failure is not None:
            raise OSError(f"a pipe is broken: {self.failure}")
        return self.has_come


class GlooPipe:
    """Through sockets, between tensors of CPUs."""

    def __init__(self, store: dist.Store, end: int, host: str, patience: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = patience
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        self._group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(store, end, 2, options)
        self._other = 1 - end
        self._waits = queue.SimpleQueue[tuple[dist.Work, _Watched] | None]()
        threading.Thread(target=self._wait, name="pipe", daemon=True).start()

    def give(self, tensor: torch.Tensor) -> Under:
        """See ``Pipe``."""
        assert self._group is not None
        group, other = self._group, self._other
        return self._watched(lambda: group.send([tensor], other, 0), tensor)

    def take(self, num_bytes: int) -> Under:
        """See ``Pipe``."""
        assert self._group is not None
        group, other = self._group, self._other
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        return self._watched(lambda: group.recv([tensor], other, 0), tensor)

    def _watched(self, ask: Callable[[], dist.Work], tensor: torch.Tensor) -> Under:
        watched = _Watched(tensor)
        try:
            self._waits.put((ask(), watched))
        except RuntimeError as error:
            raise OSError(f"a pipe is broken: {error}") from error
        return watched

    def _wait(self) -> None:
        while (one := self._waits.get()) is not None:
            work, watched = one
            try:
                work.wait()
                watched.has_come = True
            except RuntimeError as error:
                watched.failure = error

    def close(self) -> None:
        """See ``Pipe``."""
        self._waits.put(None)
        self._group = None


@dataclass(slots=True)
class _OnDevice:
    tensor: torch.Tensor
    work: dist.Work

    @property
    def is_done(self) -> bool:
        if not self.work.is_completed():
            return False
        failure = self.work.exception()
        if failure is not None:
            raise OSError(f"a pipe is broken: {failure}")
        return True


class NcclPipe:
    """From device to device, on streams of its own."""

    def __init__(
        self, store: dist.Store, end: int, device: torch.device, patience: timedelta
    ) -> None:
        # NCCL's own watch would end the process when the other host has died.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = patience
        self._group = dist.ProcessGroupNCCL(store, end, 2, options)
        self._group._set_sequence_number_for_group()
        self._group.eager_connect_single_device(device)
        self._other = 1 - end
        self._device = device
        self._beside = torch.cuda.Stream(device)

    def give(self, tensor: torch.Tensor) -> Under:
        """See ``Pipe``."""
        return self._asked(self._group.send, tensor)

    def take(self, num_bytes: int) -> Under:
        """See ``Pipe``. The memory belongs to a stream that computes nothing, so it is free."""
        with torch.cuda.stream(self._beside):
            tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            return self._asked(self._group.recv, tensor)

    def _asked(self, ask: Callable[..., dist.Work], tensor: torch.Tensor) -> Under:
        try:
            return _OnDevice(tensor, ask([tensor], self._other, 0))
        except RuntimeError as error:
            raise OSError(f"a pipe is broken: {error}") from error

    def close(self) -> None:
        """See ``Pipe``."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()
