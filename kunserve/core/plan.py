"""What a cluster serves by: its settings, and beside them what was found out at its start.

A ``KunServeConfig`` holds what somebody has chosen. What the model's shape, a profile or the
machine says is in ``Measured``: no flag sets it, and another machine has other values.
"""

from dataclasses import dataclass, replace

from kunserve.core.config import InstanceConfig, KunServeConfig, OverloadConfig
from kunserve.core.cost import NO_WINDOWS, CostCoefficients, Windows
from kunserve.core.errors import ConfigError
from kunserve.core.kv_blocks import KvBlocks, KvRing


@dataclass(frozen=True, slots=True)
class CardShare:
    """What each instance gets of the GPUs on which all of them stand."""

    utilization: float
    """Of each card's memory, for one rank with all that it needs."""
    memory_bytes: int
    """Of all ranks of an instance, for whoever asks before it has started."""


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """Relief by swapping: a preempted request's KV waits in host memory."""

    host_bytes_per_s: float
    """Of each instance's link to host memory, each way."""
    host_bytes: int | None = None
    """Host memory of each instance for KV; None is no limit."""
    max_park_s: float | None = None
    """Requests that decode are parked there too, no longer than this, so that whoever waits gets
    its first token. None: nobody is parked."""
    is_second_line: bool = False
    """A group uses host memory only after ``AllowParking``: nothing is left to drop for it."""

    @classmethod
    def of(
        cls, overload: OverloadConfig, host_bytes_per_s: float, host_bytes: int | None
    ) -> "SwapPlan | None":
        """How groups use a host memory that is reached so fast; None if they do not."""
        if not overload.uses_host_memory:
            return None
        max_park_s = None if overload.policy == "swap" else overload.max_park_s
        return cls(host_bytes_per_s, host_bytes, max_park_s, overload.park_behind_drop)


@dataclass(frozen=True, slots=True)
class Measured:
    """See the module."""

    cost: CostCoefficients | None = None
    """Of steps: from a profile, or assumed from the model's shape. None: all tokens cost alike."""
    swap: SwapPlan | None = None
    """With overload policies ``swap`` and ``park``, and with parking behind ``drop``.
    None: the KV of a preempted request is computed again."""
    ring: KvRing | None = None
    """Where layers with a window write over what no step reads again; None: they keep it."""
    share: CardShare | None = None
    """None: an instance has memory as configured."""
    weight_sharers: int = 0
    """See ``InstanceConfig``."""

    def __post_init__(self) -> None:
        """Swapping is paced by the time that steps take, so that must be known."""
        if self.swap is not None and self.cost is None:
            raise ConfigError("swapping needs the cost of steps: give a profile")

    @property
    def windows(self) -> Windows:
        """Which part of their context tokens see, as far as costs tell."""
        return NO_WINDOWS if self.cost is None else self.cost.windows


NOTHING_MEASURED = Measured()


@dataclass(frozen=True, slots=True)
class Plan:
    """See the module."""

    config: KunServeConfig
    measured: Measured = NOTHING_MEASURED

    def __post_init__(self) -> None:
        """Host memory that no policy uses is a mistake."""
        overload = self.config.overload
        if self.measured.swap is not None and not overload.uses_host_memory:
            raise ConfigError(
                f"host memory is for overload policies 'swap' and 'park', not {overload.policy!r}"
            )

    @property
    def instance(self) -> InstanceConfig:
        """Each instance's settings. Where cards are shared out they hold its share alone, instead
        of what all instances together may take.
        """
        share = self.measured.share
        own = replace(self.config.instance, weight_sharers=self.measured.weight_sharers)
        if share is None:
            return own
        return replace(
            own,
            gpu_memory_utilization=share.utilization,
            memory_bytes=share.memory_bytes,
        )

    @property
    def blocks(self) -> KvBlocks:
        """How many blocks a request's tokens take."""
        return KvBlocks(self.config.instance.block_size, self.measured.ring)
