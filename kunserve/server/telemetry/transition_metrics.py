"""Drops and restores, read from the controller's snapshot: how many, how long, what they moved."""

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric

from kunserve.core.ids import TransitionId
from kunserve.core.snapshots import ClusterState, Kind, Outcome, TransitionRecord
from kunserve.server.telemetry.histogram import Histogram
from kunserve.server.telemetry.metric_family import counter, gauge, histogram

DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
FORCED_TRIGGER, AUTOMATIC, FORCED = "admin", "automatic", "forced"
OUTCOMES = {Outcome.DONE: "done", Outcome.ROLLED_BACK: "rolled_back", Outcome.FAILED: "failed"}

DROPS = counter("kunserve:drops_total", "Drops committed.")
RESTORES = counter("kunserve:restores_total", "Restores committed.")
TRANSITIONS = counter(
    "kunserve:transitions_total",
    "Drops and restores that ended. `trigger` is `automatic` or `forced`, `outcome` is `done`, "
    "`rolled_back` (nothing had changed) or `failed` (its groups formed anew).",
    "kind",
    "trigger",
    "outcome",
)
UNDER_WAY = gauge("kunserve:transitions_under_way", "Drops and restores under way.", "kind")
AGE = gauge(
    "kunserve:transition_age_seconds", "Age of the oldest transition under way; 0 if none is."
)
DURATION = histogram(
    "kunserve:transition_duration_seconds",
    "From a transition's start to its end, the exchange of KV included.",
    "kind",
)
GAP = histogram(
    "kunserve:transition_gap_seconds",
    "The longest time in a transition that a member computed nothing.",
    "kind",
)
STALL = histogram(
    "kunserve:exchange_max_stall_seconds",
    "The longest time in a transition that a request waited for its KV.",
    "kind",
)
EXCHANGED_BYTES = counter(
    "kunserve:exchange_bytes_total", "KV bytes that transitions moved between instances.", "kind"
)
EXCHANGED_REQUESTS = counter(
    "kunserve:exchanged_requests_total", "Requests whose KV transitions moved.", "kind"
)
FAMILIES = (
    DROPS,
    RESTORES,
    TRANSITIONS,
    UNDER_WAY,
    AGE,
    DURATION,
    GAP,
    STALL,
    EXCHANGED_BYTES,
    EXCHANGED_REQUESTS,
)


class TransitionMetrics:
    """Counts each transition once, when it has ended."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._state: ClusterState | None = None
        self._seen: set[TransitionId] = set()
        self._num_ended: dict[tuple[str, ...], float] = {
            (model_name, kind.value, trigger, outcome): 0.0
            for kind in Kind
            for trigger in (AUTOMATIC, FORCED)
            for outcome in OUTCOMES.values()
        }
        kinds: list[tuple[str, ...]] = [(model_name, kind.value) for kind in Kind]
        self._moved_bytes = dict.fromkeys(kinds, 0.0)
        self._moved_requests = dict.fromkeys(kinds, 0.0)
        self._durations = {kind: Histogram(DURATION_BUCKETS) for kind in kinds}
        self._gaps = {kind: Histogram(DURATION_BUCKETS) for kind in kinds}
        self._stalls = {kind: Histogram(DURATION_BUCKETS) for kind in kinds}

    def observe(self, state: ClusterState) -> None:
        """Count what has ended since the last snapshot."""
        self._state = state
        for record in state.transitions:
            if record.finished_s is not None and record.transition_id not in self._seen:
                self._seen.add(record.transition_id)
                self._ended(record, record.finished_s)
        self._seen &= {record.transition_id for record in state.transitions}

    def _ended(self, record: TransitionRecord, finished_s: float) -> None:
        trigger = FORCED if record.trigger == FORCED_TRIGGER else AUTOMATIC
        kind = (self._model_name, record.kind.value)
        self._num_ended[*kind, trigger, OUTCOMES[record.outcome]] += 1
        self._moved_bytes[kind] += record.moved_bytes
        self._moved_requests[kind] += record.requests_moved
        if record.outcome is Outcome.DONE:
            self._durations[kind].observe(finished_s - record.started_s)
            self._gaps[kind].observe(record.gap_s)
            if record.requests_moved:
                self._stalls[kind].observe(record.max_stall_s)

    def collect(self) -> Iterable[Metric]:
        """Everything, as of the last ``observe``."""
        model, state = self._model_name, self._state
        assert state is not None
        yield DROPS.of({(model,): state.num_drops})
        yield RESTORES.of({(model,): state.num_restores})
        yield TRANSITIONS.of(self._num_ended)
        begun = [record for record in state.transitions if record.finished_s is None]
        yield UNDER_WAY.of(
            {(model, kind.value): sum(record.kind is kind for record in begun) for kind in Kind}
        )
        oldest_s = min((record.started_s for record in begun), default=state.now_s)
        yield AGE.of({(model,): max(0.0, state.now_s - oldest_s)})
        yield DURATION.of_histograms(self._durations)
        yield GAP.of_histograms(self._gaps)
        yield STALL.of_histograms(self._stalls)
        yield EXCHANGED_BYTES.of(self._moved_bytes)
        yield EXCHANGED_REQUESTS.of(self._moved_requests)
