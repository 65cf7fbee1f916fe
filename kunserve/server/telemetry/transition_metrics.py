"""Drops and restores, read from the controller's snapshot: how many, how long, what they moved."""

from kunserve.core.ids import TransitionId
from kunserve.core.snapshots import ClusterState, Kind, Outcome, TransitionRecord
from kunserve.server.telemetry.histogram import Histogram
from kunserve.server.telemetry.metric_row import Row, counter, gauge, histogram

DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
FORCED_TRIGGER, AUTOMATIC, FORCED = "admin", "automatic", "forced"
OUTCOMES = {Outcome.DONE: "done", Outcome.ROLLED_BACK: "rolled_back", Outcome.FAILED: "failed"}


class TransitionMetrics:
    """Counts each transition once, when it has ended."""

    def __init__(self, state: ClusterState) -> None:
        self.state = state
        """The last snapshot."""
        self._seen: set[TransitionId] = set()
        self.num_ended: dict[tuple[str, ...], float] = {
            (kind.value, trigger, outcome): 0.0
            for kind in Kind
            for trigger in (AUTOMATIC, FORCED)
            for outcome in OUTCOMES.values()
        }
        kinds: list[tuple[str, ...]] = [(kind.value,) for kind in Kind]
        self.moved_bytes = dict.fromkeys(kinds, 0.0)
        self.moved_requests = dict.fromkeys(kinds, 0.0)
        self.durations = {kind: Histogram(DURATION_BUCKETS) for kind in kinds}
        self.gaps = {kind: Histogram(DURATION_BUCKETS) for kind in kinds}
        self.stalls = {kind: Histogram(DURATION_BUCKETS) for kind in kinds}

    def observe(self, state: ClusterState) -> None:
        """Count what has ended since the last snapshot."""
        self.state = state
        for record in state.transitions:
            if record.finished_s is not None and record.transition_id not in self._seen:
                self._seen.add(record.transition_id)
                self._ended(record, record.finished_s)
        self._seen &= {record.transition_id for record in state.transitions}

    def _ended(self, record: TransitionRecord, finished_s: float) -> None:
        trigger = FORCED if record.trigger == FORCED_TRIGGER else AUTOMATIC
        kind = (record.kind.value,)
        self.num_ended[*kind, trigger, OUTCOMES[record.outcome]] += 1
        self.moved_bytes[kind] += record.moved_bytes
        self.moved_requests[kind] += record.requests_moved
        if record.outcome is Outcome.DONE:
            self.durations[kind].observe(finished_s - record.started_s)
            self.gaps[kind].observe(record.gap_s)
            if record.requests_moved:
                self.stalls[kind].observe(record.max_stall_s)


ROWS: tuple[Row[TransitionMetrics], ...] = (
    counter("kunserve:drops_total", "Drops committed.", lambda own: own.state.num_drops),
    counter("kunserve:restores_total", "Restores committed.", lambda own: own.state.num_restores),
    counter(
        "kunserve:transitions_total",
        "Drops and restores that ended. `trigger` is `automatic` or `forced`, `outcome` is `done`, "
        "`rolled_back` (nothing had changed) or `failed` (its groups formed anew).",
        lambda own: own.num_ended,
        "kind",
        "trigger",
        "outcome",
    ),
    gauge(
        "kunserve:transitions_under_way",
        "Drops and restores under way.",
        lambda own: {
            (kind.value,): sum(one.kind is kind for one in _begun(own.state)) for kind in Kind
        },
        "kind",
    ),
    gauge(
        "kunserve:transition_age_seconds",
        "Age of the oldest transition under way; 0 if none is.",
        lambda own: max([0.0, *(own.state.now_s - one.started_s for one in _begun(own.state))]),
    ),
    histogram(
        "kunserve:transition_duration_seconds",
        "From a transition's start to its end, the exchange of KV included.",
        lambda own: own.durations,
        "kind",
    ),
    histogram(
        "kunserve:transition_gap_seconds",
        "The longest time in a transition that a member computed nothing.",
        lambda own: own.gaps,
        "kind",
    ),
    histogram(
        "kunserve:exchange_max_stall_seconds",
        "The longest time in a transition that a request waited for its KV.",
        lambda own: own.stalls,
        "kind",
    ),
    counter(
        "kunserve:exchange_bytes_total",
        "KV bytes that transitions moved between instances.",
        lambda own: own.moved_bytes,
        "kind",
    ),
    counter(
        "kunserve:exchanged_requests_total",
        "Requests whose KV transitions moved.",
        lambda own: own.moved_requests,
        "kind",
    ),
)


def _begun(state: ClusterState) -> list[TransitionRecord]:
    return [record for record in state.transitions if record.finished_s is None]
