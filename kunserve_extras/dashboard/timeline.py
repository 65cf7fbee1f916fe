"""The last minutes of the cluster, sampled for people: ``GET /kunserve/timeline``."""

import time
import uuid
from collections import deque
from typing import Any, NamedTuple, Protocol

import msgspec

from kunserve.core.ids import TransitionId
from kunserve.core.snapshots import ClusterState, TransitionRecord
from kunserve.server.telemetry.cluster_metrics import ClusterMetrics
from kunserve.server.telemetry.request_metrics import RecentValues
from kunserve.server.telemetry.sampler import PERIOD_S
from kunserve.server.telemetry.state_json import record_object

KEPT_S = 1200.0
MAX_SAMPLE_BYTES = 16 << 20
"""Of all samples, which are kept as they are sent: a group is about 180 bytes of each."""
MAX_TRANSITIONS = 1000


class Measured(Protocol):
    """Whose figures are sampled: a front's, or those of several."""

    recent_first_token: RecentValues
    recent_per_token: RecentValues
    cluster: ClusterMetrics

    @property
    def arrivals(self) -> int:
        """Requests that were taken; as are the next two, so far."""
        ...

    @property
    def refusals(self) -> dict[str, int]:
        """Refused ones, by reason."""
        ...

    @property
    def generation_tokens(self) -> int:
        """Output tokens."""
        ...


class _Sample(NamedTuple):
    number: int
    """How many were taken before it."""
    t_s: float
    json: msgspec.Raw


class _Queue:
    """Samples in order, and what they take."""

    def __init__(self) -> None:
        self.samples: deque[_Sample] = deque()
        self.num_bytes = 0

    def append(self, sample: _Sample) -> None:
        self.samples.append(sample)
        self.num_bytes += len(sample.json)

    def popleft(self) -> _Sample:
        sample = self.samples.popleft()
        self.num_bytes -= len(sample.json)
        return sample


class Samples:
    """The latest samples, bounded in number and in bytes.

    Half of the bytes has every sample up to now. The other half has of what is older as many as
    reach back to the end: in a small cluster all, in a large one some.
    """

    def __init__(self, at_most: int, max_bytes: int) -> None:
        """``at_most`` samples ago is the end."""
        self._at_most = at_most
        self._half_bytes = max_bytes // 2
        self._num_taken = 0
        self._recent, self._older = _Queue(), _Queue()

    def add(self, t_s: float, json: bytes) -> None:
        """The next one, as it will be sent."""
        recent, older = self._recent, self._older
        recent.append(_Sample(self._num_taken, t_s, msgspec.Raw(json)))
        self._num_taken += 1
        end = self._num_taken - self._at_most
        while recent.samples[0].number < end or (
            recent.num_bytes > self._half_bytes and len(recent.samples) > 1
        ):
            self._age(recent.popleft())
        while older.samples and (
            older.samples[0].number < end or older.num_bytes > self._half_bytes
        ):
            older.popleft()

    def _age(self, sample: _Sample) -> None:
        """Keep it unless too little time has passed since the last that was kept."""
        older = self._older
        span = self._at_most - len(self._recent.samples)
        every = -(-span * len(sample.json) // self._half_bytes)
        if not older.samples or sample.number - older.samples[-1].number >= every:
            older.append(sample)

    def after(self, since_s: float | None) -> list[msgspec.Raw]:
        """Those later than that (all if None), in order."""
        return [
            sample.json
            for queue in (self._older, self._recent)
            for sample in queue.samples
            if since_s is None or sample.t_s > since_s
        ]


class Timeline:
    """The samples of the last minutes, bounded however many groups there are.

    Times are the controller's clock; ``unix_s`` ties it to ours.
    """

    def __init__(
        self,
        metrics: Measured,
        period_s: float = PERIOD_S,
        kept_s: float = KEPT_S,
        max_bytes: int = MAX_SAMPLE_BYTES,
    ) -> None:
        self._metrics = metrics
        self._period_s = period_s
        self._samples = Samples(max(1, int(kept_s / period_s)), max_bytes)
        self._transitions: dict[TransitionId, tuple[TransitionRecord, msgspec.Raw]] = {}
        """Each with what is sent of it."""
        self._run_id = uuid.uuid4().hex

    def sample(self, state: ClusterState) -> None:
        """Take one sample of what the cluster's metrics have just seen."""
        metrics = self._metrics
        self._remember(state)
        now_s = time.monotonic()
        first_p50, first_p99 = metrics.recent_first_token.percentiles(now_s, 0.5, 0.99)
        token_p50, token_p99 = metrics.recent_per_token.percentiles(now_s, 0.5, 0.99)
        sample = {
            "t_s": state.now_s,
            "unix_s": time.time(),
            "groups": _groups(state, metrics.cluster),
            "num_running": sum(load.num_running for load in state.loads),
            "num_waiting": state.num_waiting,
            "num_dropped_instances": sum(
                instance.dropped_bytes > 0 for instance in state.instances
            ),
            "num_in_freed_memory": metrics.cluster.avoided.num_requests,
            "queueing_avoided_s": metrics.cluster.avoided.request_s,
            "ttft_count": metrics.recent_first_token.count(now_s),
            "ttft_p50_s": first_p50,
            "ttft_p99_s": first_p99,
            "tpot_p50_s": token_p50,
            "tpot_p99_s": token_p99,
            "arrivals": metrics.arrivals,
            "refusals": sum(metrics.refusals.values()),
            "generation_tokens": metrics.generation_tokens,
        }
        self._samples.add(state.now_s, msgspec.json.encode(sample))

    def _remember(self, state: ClusterState) -> None:
        for record in state.transitions:
            known = self._transitions.get(record.transition_id)
            if known is None or known[0] is not record:
                written = msgspec.Raw(msgspec.json.encode(record_object(record)))
                self._transitions[record.transition_id] = record, written
        while len(self._transitions) > MAX_TRANSITIONS:
            del self._transitions[next(iter(self._transitions))]

    def view(self, since_s: float | None) -> bytes:
        """As JSON: samples and ends of transitions later than ``since_s`` (all if None), what runs.

        In a large cluster older samples are further apart. Another ``run_id`` than before means
        another run of the server: its times and transition ids have nothing to do with the last
        one's.
        """
        view = {
            "run_id": self._run_id,
            "period_s": self._period_s,
            "samples": self._samples.after(since_s),
            "transitions": [
                written
                for record, written in self._transitions.values()
                if since_s is None or record.finished_s is None or record.finished_s > since_s
            ],
        }
        return msgspec.json.encode(view)


def _groups(state: ClusterState, metrics: ClusterMetrics) -> list[dict[str, Any]]:
    return [
        {
            "group_id": group.group_id,
            "leader": group.leader,
            "num_stages": len(group.stages),
            "used_blocks": load.used_blocks,
            "capacity_blocks": load.capacity_blocks,
            "demand_blocks": load.demand_blocks,
            "need_blocks": load.used_blocks + load.growth_blocks + load.waiting_blocks,
            "num_running": load.num_running,
            "num_waiting": load.num_waiting,
            "bubble_ratio": metrics.bubble_ratio(group.leader),
        }
        for group, load in state.loads_by_group()
        if load is not None
    ]
