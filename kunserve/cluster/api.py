"""What the HTTP front needs of a cluster, whether its instances are real or fake."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import Ready, TokenOutput
from kunserve.core.request import Request
from kunserve.core.snapshots import ClusterState

Deliver: TypeAlias = Callable[[TokenOutput], None]
"""Called on the event loop for every token of a request, and last with a finish reason."""


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """The largest request that can be served."""

    max_model_len: int
    """Prompt plus output tokens: the least of the model's, the user's and the memory's limit."""
    block_size: int
    vocab_size: int

    def shortfall(self, ready: Ready) -> str | None:
        """Why an instance that comes later is of no use: what it has no room for may be sent to it.
        None if it can serve all.
        """
        own = _longest_of(ready)
        if own >= self.max_model_len:
            return None
        return (
            f"it has room for requests of {own} tokens, but this server takes {self.max_model_len}:"
            " give it as much memory as the others have, or start the server with a lower"
            " --max-model-len"
        )


def limits_of(ready: tuple[Ready, ...], vocab_size: int) -> ServingLimits:
    """What every one of these instances can serve."""
    return ServingLimits(
        max_model_len=min(map(_longest_of, ready)),
        block_size=ready[0].spec.block_size,
        vocab_size=vocab_size,
    )


def _longest_of(ready: Ready) -> int:
    spec = ready.spec
    return min(spec.blocks.tokens_in(spec.kv_units // spec.num_layers), ready.max_model_len)


@dataclass(frozen=True, slots=True)
class Vitals:
    """How whole the cluster is."""

    num_instances: int
    """As many as there are, or are being started."""
    num_missing: int
    """Of these, those that have died: replacements are being started."""
    num_errors: int
    """Internal errors that the cluster survived. Each one is a bug."""
    num_starting: int = 0
    """Of them, those by which the cluster grows: they have not served yet."""
    pids: tuple[tuple[InstanceId, int], ...] = ()
    """The process of each instance that has one."""


class EngineClient(Protocol):
    """A running cluster. All methods belong to one event loop."""

    @property
    def limits(self) -> ServingLimits:
        """Known once started; never changes."""
        ...

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Start a request; its tokens come through ``deliver``.

        Raises Overloaded when a queue limit is reached, Unavailable when draining or when no
        instance is alive, PromptTooLong when it could never run.
        """
        ...

    async def admitted(self, request_id: RequestId) -> None:
        """Awaited after ``submit``: raises what that would, where the answer has a way to come."""
        ...

    def abort(self, request_id: RequestId) -> None:
        """Free everything of the request within one step; ``deliver`` is not called again."""
        ...

    def state(self) -> ClusterState:
        """A snapshot for people and metrics."""
        ...

    def is_healthy(self) -> bool:
        """At least one group serves and none of its members is known dead."""
        ...

    def is_progressing(self) -> bool:
        """No group is stuck: every one with work completed a step lately."""
        ...

    def vitals(self) -> Vitals:
        """How whole the cluster is; it serves with what it has."""
        ...

    def num_unfinished(self) -> int:
        """Requests submitted and not yet ended."""
        ...

    def stop_admission(self) -> None:
        """Refuse new requests from now on (drain)."""
        ...

    async def drop(self, num_bytes: int | None) -> str:
        """Force a drop of at least that much (one merge when None); returns once committed.

        The string says what was done. Raises InvalidRequest when nothing can be dropped.
        """
        ...

    async def restore(self) -> str:
        """Force a restore of every dropped group; returns once done. Raises InvalidRequest."""
        ...

    async def scale(self, num_instances: int) -> str:
        """Have so many instances: the cluster goes there by itself, this returns at once.

        The string says what is being done. Raises InvalidRequest when that many cannot be.
        """
        ...

    def set_paused(self, paused: bool) -> None:
        """While paused, drops and restores are made by hand only."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Have every group forget the KV of equal beginnings that no request shares."""
        ...

    async def kill(self, instance_id: InstanceId) -> None:
        """Kill one instance's process (fault drills)."""
        ...

    async def close(self) -> None:
        """Stop every instance and release everything."""
        ...
