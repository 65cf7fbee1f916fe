"""What bulk movers say to each other: chunk requests one way, their bytes the other.

Bytes themselves go beside the codec, as a frame of their own that nobody copies.
"""

import contextlib
import enum
import os
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from kunserve.core.layout import LayerRange
from kunserve.transport.wire.codec import Codec, MalformedMessage

Bytes: TypeAlias = npt.NDArray[np.uint8]
Int32Array: TypeAlias = npt.NDArray[np.int32]


class KvChunk(msgspec.Struct, frozen=True, array_like=True):
    """Units [first_unit, first_unit + num_units) of a run of blocks, counted block by block."""

    ticket: int
    transition_id: int
    request_id: str
    layers: tuple[int, int]
    blocks: tuple[int, int]
    first_unit: int
    num_units: int
    may_read: bool = False
    """Whether the taker would rather read the bytes in the source's memory file."""


class LayerChunk(msgspec.Struct, frozen=True, array_like=True):
    """Bytes [offset, offset + num_bytes) of one layer's weights."""

    ticket: int
    layer: int
    offset: int
    num_bytes: int
    may_read: bool = False


class Where(msgspec.Struct, frozen=True, array_like=True):
    """Where does your memory lie? Asked before anything moves, because mapping it takes longer."""

    ticket: int = -1
    """Of no chunk."""


Chunk: TypeAlias = KvChunk | LayerChunk | Where


class Answer(enum.IntEnum):
    """What a source says to a chunk request."""

    DATA = 0
    """The bytes follow in the next frame."""
    NOT_YET = 1
    """Never heard of it: the source may not have come to this transition yet. Ask again."""
    REFUSED = 2
    """Withdrawn, or not held: it will not come."""
    LOCATED = 3
    """The bytes lie there in the source's memory file."""


class SharedFile(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A memory file, for processes of the same host and user."""

    pid: int
    fd: int
    device: int
    inode: int
    """With the device: a number that another file has is another file."""

    @classmethod
    def of(cls, fd: int) -> "SharedFile":
        """One of this process."""
        status = os.fstat(fd)
        return cls(os.getpid(), fd, status.st_dev, status.st_ino)

    @contextlib.contextmanager
    def opened(self, flags: int = os.O_RDONLY) -> Iterator[int | None]:
        """Within, a descriptor to read it; None where it cannot be reached, or is another file."""
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", flags | os.O_NONBLOCK)
        except OSError:
            yield None
            return
        try:
            status = os.fstat(fd)
            is_same = (status.st_dev, status.st_ino) == (self.device, self.inode)
            yield fd if is_same else None
        finally:
            os.close(fd)


class SharedGranules(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Memory of a device in granules, for processes of the same host and user."""

    path: str
    """Of the socket at which they are handed out (``granule_server``)."""
    granule_bytes: int
    num_granules: int


class Located(msgspec.Struct, frozen=True, array_like=True):
    """Where bytes lie, and the count for which this is true."""

    memory: SharedFile | SharedGranules
    counts: SharedFile
    count: tuple[int, int]
    """Which one of them, and its value."""
    extents: tuple[tuple[int, int], ...]
    """(offset, bytes), one after the other; granules count as if they were one file."""


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of an answer."""

    ticket: int
    answer: Answer
    located: Located | None = None


_CODEC: Codec[Chunk | Reply] = Codec((KvChunk, LayerChunk, Reply, Where))
encode = _CODEC.encode


def chunk_in(frames: Sequence[zmq.Frame]) -> Chunk | None:
    """A request; None for nonsense."""
    said = _said(frames[0]) if frames else None
    return said if isinstance(said, Chunk) else None


def reply_in(head: zmq.Frame) -> Reply | None:
    """An answer's first frame; None for nonsense."""
    said = _said(head)
    return said if isinstance(said, Reply) else None


def _said(frame: zmq.Frame) -> Chunk | Reply | None:
    try:
        return _CODEC.decode(frame.buffer)
    except MalformedMessage:
        return None


def unit_runs(
    entries: Int32Array, layers: LayerRange, first_unit: int, num_units: int
) -> Iterator[tuple[int, int]]:
    """(first unit of memory, count) of each run of consecutive units that make up a chunk.

    Entry ``e`` of a block puts layer ``l`` at unit ``e + l``, so a block's part of the chunk is
    one run.
    """
    unit, end = first_unit, first_unit + num_units
    while unit < end:
        block, within = divmod(unit, layers.num_layers)
        count = min(layers.num_layers - within, end - unit)
        yield int(entries[block]) + layers.first + within, count
        unit += count
