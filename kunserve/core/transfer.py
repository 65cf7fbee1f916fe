"""What one instance pulls from another, KV of a request or weights of layers, and where it is."""

from dataclasses import dataclass
from typing import NamedTuple

from kunserve.core.ids import InstanceId, RequestId, TransitionId
from kunserve.core.layout import LayerRange


@dataclass(frozen=True, slots=True)
class KvPull:
    """A run of one request's blocks to pull from ``src`` over ``layers``."""

    transition_id: TransitionId
    request_id: RequestId
    src: InstanceId
    layers: LayerRange
    first_block: int
    end_block: int


@dataclass(frozen=True, slots=True)
class LayerPull:
    """Weights of ``layers`` to pull from ``src``."""

    layers: LayerRange
    src: InstanceId


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """Weights of ``layers`` to load from disk, or from a copy in host memory."""

    layers: LayerRange
    src: None = None


class PeerAddress(NamedTuple):
    """Where peers reach an instance."""

    links: str
    """Messages and activations."""
    bulk: str
    """KV and weights."""
    public_key: str = ""
    """Of the process, on a network: it tells the process from those before it."""
    machine: str = ""
    """Instances of equal ones can read each other's memory files."""
    maps: bool = False
    """It maps the memory of those on its machine that do so too, which takes longer than a drop."""
