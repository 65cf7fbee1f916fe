"""What a front and the controller's process say to each other, and the socket that carries it."""

import asyncio
import struct
import time
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar, cast, get_args

import msgspec

from kunserve.cluster.api import ServingLimits, Vitals
from kunserve.core.config import KunServeConfig
from kunserve.core.errors import (
    InvalidRequest,
    KunServeError,
    Overloaded,
    PromptTooLong,
    Unavailable,
)
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.request import Request
from kunserve.core.snapshots import ClusterState
from kunserve.model.generation_config import SamplingDefaults
from kunserve.transport.wire.codec import Codec
from kunserve_extras.fronts.tally import FamilyCount

MAX_FRAME_BYTES = 1 << 30
MAX_WAITING_BYTES = 256 << 20
"""What may wait to be read by the other end; more, and the link is given up."""
HIGH_WATER_BYTES = 1 << 20
"""With more than this waiting, the other end counts as slow."""
_LENGTH = struct.Struct("<I")


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One message."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A ``KunServeError`` on its way to the other end."""

    kind: str
    message: str
    retry_after_s: int = 1
    limit: str = ""
    param: str | None = None

    @classmethod
    def of(cls, error: KunServeError) -> "Failure":
        """What is to be told of it."""
        kind, message = type(error).__name__, str(error)
        if isinstance(error, Overloaded):
            return cls(kind, message, error.retry_after_s, error.limit)
        return cls(kind, message, param=getattr(error, "param", None))

    def to_error(self) -> KunServeError:
        """The error, to be raised at this end."""
        match self.kind:
            case Overloaded.__name__:
                return Overloaded(self.message, self.retry_after_s, self.limit)
            case PromptTooLong.__name__:
                return PromptTooLong(self.message, self.param)
            case InvalidRequest.__name__:
                return InvalidRequest(self.message, self.param)
            case _:
                return Unavailable(self.message)


# From a front


class Submit(_Message, frozen=True):
    """A request; a ``Verdict`` answers."""

    request: Request


class Abort(_Message, frozen=True):
    """The client is gone."""

    request_id: RequestId


class Drop(_Message, frozen=True):
    """Drop so many bytes by hand, or what one merge gives."""

    num_bytes: int | None


class Restore(_Message, frozen=True):
    """Restore all that is dropped."""


class Scale(_Message, frozen=True):
    """Have so many instances."""

    num_instances: int


class SetPaused(_Message, frozen=True):
    """Make drops and restores by hand only, or no more."""

    paused: bool


class ResetPrefixCache(_Message, frozen=True):
    """Forget all prefixes."""


class Kill(_Message, frozen=True):
    """End an instance's process."""

    instance_id: InstanceId


class ReadMetrics(_Message, frozen=True):
    """The text of ``/metrics``, of the whole server."""


class ReadTimeline(_Message, frozen=True):
    """``/kunserve/timeline``: what came after that moment, or all."""

    since_s: float | None


Order: TypeAlias = (
    Drop | Restore | Scale | SetPaused | ResetPrefixCache | Kill | ReadMetrics | ReadTimeline
)


class Call(_Message, frozen=True):
    """An order to the controller's process; an ``Answer`` of this number follows."""

    number: int
    order: Order


class Counted(_Message, frozen=True):
    """What the front has counted so far, and what is new since it last told."""

    arrivals: int
    refusals: dict[str, int]
    generation_tokens: int
    num_in_flight: int
    first_token_s: list[float]
    per_token_s: list[float]
    families: list[FamilyCount] | None
    """All its counters and histograms; None when they are not due."""


FromFront: TypeAlias = Submit | Abort | Call | Counted

# From the controller's process


class Welcome(_Message, frozen=True):
    """The first message: everything that a front needs."""

    number: int
    config: KunServeConfig
    model_name: str
    defaults: SamplingDefaults
    limits: ServingLimits


class Verdict(_Message, frozen=True):
    """Whether a request was taken."""

    request_id: RequestId
    failure: Failure | None


class Tokens(_Message, frozen=True):
    """Tokens of any requests, in order."""

    tokens: list[TokenOutput]


class News(_Message, frozen=True):
    """How the cluster is, several times a second."""

    state: ClusterState
    vitals: Vitals
    is_healthy: bool
    is_progressing: bool
    num_unfinished: int


class Answer(_Message, frozen=True):
    """To a ``Call``."""

    number: int
    value: str | None
    failure: Failure | None = None


class CountNow(_Message, frozen=True):
    """Tell all counters now: somebody reads them."""


class Leave(_Message, frozen=True):
    """Drain and end; a second one cuts the drain short."""


FromController: TypeAlias = Welcome | Verdict | Tokens | News | Answer | CountNow | Leave

_CODEC: Codec[FromFront | FromController] = Codec((*get_args(FromFront), *get_args(FromController)))
T = TypeVar("T")


def frame_of(message: FromFront | FromController) -> bytes:
    """As bytes on the wire, length first."""
    data = _CODEC.encode(message)
    return _LENGTH.pack(len(data)) + data


class Link(asyncio.Protocol, Generic[T]):
    """One end of the socket pair. Belongs to one event loop."""

    def __init__(self, on_message: Callable[[T], None], on_end: Callable[[], None]) -> None:
        """``on_end`` is called once, when the other end is gone or talks nonsense."""
        self._on_message = on_message
        self._on_end = on_end
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._slow_since_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether anything may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def slow_s(self) -> float:
        """How long the other end has left much unread; 0.0 while it keeps up."""
        return 0.0 if self._slow_since_s is None else time.monotonic() - self._slow_since_s

    def send(self, message: FromFront | FromController) -> bool:
        """Queue a message. False when the link is over, or too much waits already."""
        return self.send_frame(frame_of(message)) if self.is_open else False

    def send_frame(self, frame: bytes) -> bool:
        """As ``send``, of what ``frame_of`` has made: many may be told the same."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if transport.get_write_buffer_size() > MAX_WAITING_BYTES:
            return False
        transport.write(frame)
        return True

    def close(self) -> None:
        """End it now; what waits is not sent."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``; as are the others."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end is gone."""
        self._transport = None
        self._on_end()

    def pause_writing(self) -> None:
        """Much waits."""
        self._slow_since_s = time.monotonic()

    def resume_writing(self) -> None:
        """It was read."""
        self._slow_since_s = None

    def data_received(self, data: bytes) -> None:
        """Read every message that is complete."""
        buffer = self._buffer
        buffer += data
        first = 0
        while len(buffer) - first >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer, first)
            end = first + _LENGTH.size + size
            if size > MAX_FRAME_BYTES:
                self.close()
                return
            if len(buffer) < end:
                break
            message = _CODEC.decode(memoryview(buffer)[first + _LENGTH.size : end])
            first = end
            self._on_message(cast(T, message))
        if first:
            del buffer[:first]
