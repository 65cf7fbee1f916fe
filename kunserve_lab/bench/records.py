"""What a run leaves behind: one record per request, one sample per look at the server."""

from dataclasses import dataclass

REFUSED = "HTTP 503"
"""How the error of a request begins that the server did not take."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as its client saw it. All times are seconds since the run began.

    A request that failed has an ``error``; whatever it received before is kept.
    """

    number: int
    """Its place in the workload, from 0."""
    server: str
    planned_s: float
    """When the workload wanted it sent."""
    sent_s: float
    token_times_s: tuple[float, ...]
    """When each chunk that carried at least one token arrived."""
    last_token_s: float | None
    """When the last token arrived; a final chunk without text counts for this only."""
    finish_s: float
    """When the response ended, or failed."""
    input_tokens: int
    """By the server's usage, else as asked for."""
    asked_output_tokens: int
    output_tokens: int
    """By the server's usage, else the number of chunks."""
    finish_reason: str | None
    error: str | None

    @property
    def succeeded(self) -> bool:
        """Whether a whole response arrived."""
        return self.error is None

    @property
    def was_refused(self) -> bool:
        """Whether the server did not take it: too many wait."""
        return self.error is not None and self.error.startswith(REFUSED)


@dataclass(frozen=True, slots=True)
class ServerSample:
    """One look at ``/metrics``, summed over servers. None: the server does not say."""

    time_s: float
    kv_usage: float | None = None
    """Share of the KV memory in use, 0 to 1; the mean over servers and engines."""
    num_running: float | None = None
    num_waiting: float | None = None
    num_preemptions: float | None = None
    kv_used_blocks: float | None = None
    kv_capacity_blocks: float | None = None
    kv_demand_blocks: float | None = None
    """In use, still to be grown into, and needed by the head of the queue."""
    num_drops: float | None = None
    num_restores: float | None = None
    stage_busy_s: float | None = None
    """Computing time of pipelines' stages so far, all together."""
    stage_active_s: float | None = None
    """The same, idle while their pipelines had work included."""
