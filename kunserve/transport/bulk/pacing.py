"""How fast bulk may go: chunk size, chunks in flight, a link's rate."""

from dataclasses import dataclass

KIB = 1024
_MIN_CHUNK_BYTES = 64 * KIB
_MAX_CHUNK_BYTES = 1024 * KIB
_STAGE_TIME_S = 0.002
_NETWORK_CHUNK_S = 0.001
"""How long a chunk occupies a link between hosts: an activation waits for all those in flight."""
_NETWORK_CREDIT_S = 0.001
"""A late timer is made good by one chunk, and not by several at once in the card's queue."""
_MAX_IN_FLIGHT = 4
_UNKNOWN_LINK_GBPS = 1.0
"""For the size of chunks between hosts: small enough for the slowest link that is in use."""
LINK_SHARE = 0.9
"""Of a network link's rate, for bulk: the rest is the activations'."""


@dataclass(frozen=True, slots=True)
class BulkPacing:
    """The bounds that keep bulk out of the way of activations (section 5 of the design)."""

    chunk_bytes: int = 512 * KIB
    """Asked for at once; at least one KV unit moves whatever this says."""
    mapped_chunk_bytes: int = 16 * 1024 * KIB
    """The same where bytes are copied from where a source has them: only their place is told."""
    read_chunk_bytes: int = 2 * 1024 * KIB
    """The same where they are read in a source's file: so long no remap can begin."""
    max_in_flight: int = 2
    """Chunks an instance has asked for and not received, over all sources that answer in time."""
    max_read_in_flight: int = 32
    """The same where only places are told: so many wait for their copy that none waits for a word.
    """
    link_gbps: float | None = None
    """Rate at which a source gives bytes; None is as fast as they go."""
    credit_s: float = 0.005
    """What a source that gave too little may make good at once, in time at that rate."""
    max_yield_s: float = 0.02
    """Longest pause of one chunk for activations, so that bulk never starves."""
    stall_s: float = 0.1
    """A source that owes a chunk for this long is asked for no more until it answers.

    The chunks it owes are no longer counted, so that the other sources go on.
    """
    chunk_timeout_s: float = 10.0
    """A source silent for this long is taken for dead: all its pulls end."""
    unknown_grace_s: float = 20.0
    """How long a source may not have heard of a request yet (it finishes its step first)."""

    def __post_init__(self) -> None:
        assert self.chunk_bytes > 0 and self.max_in_flight > 0, self
        assert self.link_gbps is None or self.link_gbps > 0, self

    @classmethod
    def for_link(cls, link_gbps: float | None, *, is_network: bool = False) -> "BulkPacing":
        """The defaults, with the chunk that suits a link of this rate.

        Between hosts chunks stay small also where nobody has told the rate, because all that is in
        flight may stand before an activation in one card's queue.

        Without a limit bytes go through this machine's memory, a MiB in under half a millisecond,
        and what a chunk costs are the wake-ups of four threads beside steps that use every core:
        so chunks are large and enough of them under way to hide those.
        """
        if link_gbps is None and is_network:
            return cls(chunk_bytes=chunk_bytes_for(_UNKNOWN_LINK_GBPS, _NETWORK_CHUNK_S))
        if link_gbps is None:
            return cls(chunk_bytes=_MAX_CHUNK_BYTES, max_in_flight=_MAX_IN_FLIGHT)
        if is_network:
            return cls(
                chunk_bytes=chunk_bytes_for(link_gbps, _NETWORK_CHUNK_S),
                link_gbps=LINK_SHARE * link_gbps,
                credit_s=_NETWORK_CREDIT_S,
            )
        return cls(chunk_bytes=chunk_bytes_for(link_gbps, _STAGE_TIME_S), link_gbps=link_gbps)


def chunk_bytes_for(link_gbps: float, stage_time_s: float) -> int:
    """A chunk that occupies the measured link for about one stage's time."""
    wanted = int(link_gbps * 1e9 / 8 * stage_time_s)
    return max(_MIN_CHUNK_BYTES, min(_MAX_CHUNK_BYTES, wanted))


class TokenBucket:
    """A rate limit with a little credit, so that late timers do not lower the average."""

    def __init__(self, gbps: float | None, credit_s: float) -> None:
        self._bytes_per_s = None if gbps is None else gbps * 1e9 / 8
        self._credit_s = credit_s
        self._free_at_s = 0.0

    def delay_s(self, now_s: float) -> float:
        """How long to wait before the next bytes may go."""
        return max(0.0, self._free_at_s - now_s)

    def take(self, num_bytes: int, now_s: float) -> None:
        """The bytes go now."""
        if self._bytes_per_s is not None:
            began_s = max(self._free_at_s, now_s - self._credit_s)
            self._free_at_s = began_s + num_bytes / self._bytes_per_s
