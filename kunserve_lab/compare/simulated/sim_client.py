"""A simulated client and its watch on the servers: the same records as a real run leaves."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kunserve.core.ids import RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.request import FinishReason, Request, SamplingParams
from kunserve.core.snapshots import ClusterState
from kunserve_lab.bench.records import REFUSED, RequestRecord, ServerSample
from kunserve_lab.compare.simulated.prompts import Prompts
from kunserve_lab.sim.by_time import TimedWorld
from kunserve_lab.sim.events import EventHeap
from kunserve_lab.workload.workload import Workload, WorkloadRequest

SAMPLE_PERIOD_S = 0.5
STALL_S = 600.0
"""Virtual time in which requests are out and none gets a token, after which the rest has failed."""
SERVER = "simulated"
_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)
"""How a response ends that counts as completed."""


@dataclass(slots=True)
class _Open:
    """A request whose response has not ended."""

    wanted: WorkloadRequest
    token_times_s: list[float] = field(default_factory=list)


class SimClient:
    """Sends a workload open loop and writes down what comes back. Times count from ``start_s``."""

    def __init__(
        self,
        heap: EventHeap,
        workload: Workload,
        start_s: float,
        on_end: Callable[[RequestRecord], None],
    ) -> None:
        self._heap = heap
        self._start_s = start_s
        self._on_end = on_end
        self._pending = iter(workload.requests())
        self._open: dict[RequestId, _Open] = {}
        self._heard_s = 0.0
        """When the last token came. Tokens of one step share the number: records hold millions."""
        self._busy_s = 0.0
        """Since when some request has been out. Nobody owes anything while none is."""
        self._prompts = Prompts()
        self._num_left = len(workload)
        self.num_prompt_tokens = 0
        """Of requests that have a first token."""
        self.num_cached_tokens = 0
        """Of those: their KV was found."""
        self.records: list[RequestRecord] = []
        self.samples: list[ServerSample] = []

    @property
    def num_left(self) -> int:
        """Requests that have not ended, those still to come included."""
        return self._num_left

    @property
    def end_s(self) -> float:
        """When the last response so far ended."""
        return max((record.finish_s for record in self.records), default=0.0)

    def begin(self, cluster: TimedWorld) -> None:
        """From now on requests go out when the workload says."""
        self._cluster = cluster
        self._schedule_next()
        self._heap.at(self._start_s, self._sample)

    def received(self, token: TokenOutput) -> None:
        """The front passes a token on."""
        entry = self._open.get(token.request_id)
        if entry is None:
            return
        now_s = self._heap.now_s() - self._start_s
        if now_s == self._heard_s:
            now_s = self._heard_s
        else:
            self._heard_s = now_s
        if token.token_id is not None:
            if not entry.token_times_s:
                self.num_prompt_tokens += entry.wanted.input_tokens
                self.num_cached_tokens += token.num_cached_tokens
            entry.token_times_s.append(now_s)
        if token.finish_reason is not None:
            del self._open[token.request_id]
            is_whole = token.finish_reason in _WHOLE and bool(entry.token_times_s)
            error = None if is_whole else f"ended by {token.finish_reason}"
            self._record(entry, now_s, str(token.finish_reason), error)

    def _schedule_next(self) -> None:
        wanted = next(self._pending, None)
        if wanted is not None:
            self._heap.at(self._start_s + wanted.arrival_s, self._send, wanted)

    def _send(self, wanted: WorkloadRequest) -> None:
        self._schedule_next()
        request = Request(
            RequestId(f"r{wanted.number}"),
            self._prompts.of(wanted),
            SamplingParams(max_tokens=wanted.output_tokens, temperature=0.0, ignore_eos=True),
            self._heap.now_s(),
            priority=wanted.priority,
        )
        entry = _Open(wanted)
        limit = self._cluster.profile.max_model_len
        if request.max_stored_tokens > limit:
            error = f"{request.max_stored_tokens} tokens are more than the {limit} that fit"
            self._record(entry, wanted.arrival_s, None, error)
            return
        shed = self._cluster.controller.admit(request)
        if shed is not None:
            self._record(entry, wanted.arrival_s, None, f"{REFUSED}: {shed.reason}")
            return
        if not self._open:
            self._busy_s = self._heap.now_s() - self._start_s
        self._open[request.request_id] = entry
        self._cluster.submit(request)

    def _record(
        self, entry: _Open, finish_s: float, finish_reason: str | None, error: str | None
    ) -> None:
        wanted, times_s = entry.wanted, entry.token_times_s
        record = RequestRecord(
            number=wanted.number,
            server=SERVER,
            planned_s=wanted.arrival_s,
            sent_s=wanted.arrival_s,
            token_times_s=tuple(times_s),
            last_token_s=times_s[-1] if times_s else None,
            finish_s=finish_s,
            input_tokens=wanted.input_tokens,
            asked_output_tokens=wanted.output_tokens,
            output_tokens=len(times_s),
            finish_reason=finish_reason,
            error=error,
        )
        self._num_left -= 1
        self.records.append(record)
        self._on_end(record)

    def _sample(self) -> None:
        now_s = self._heap.now_s()
        self.samples.append(sample_of(self._cluster.controller.state(now_s), now_s - self._start_s))
        self._give_up_if_stalled(now_s - self._start_s)
        self._heap.after(SAMPLE_PERIOD_S, self._sample)

    def _give_up_if_stalled(self, now_s: float) -> None:
        """Whatever has not ended has failed, where the servers have long been silent."""
        if not self._open or now_s - max(self._heard_s, self._busy_s) <= STALL_S:
            return
        reason = f"no token for {STALL_S:.0f} s"
        for entry in tuple(self._open.values()):
            self._record(entry, now_s, None, reason)
        self._open.clear()
        for wanted in self._pending:
            self._record(_Open(wanted), wanted.arrival_s, None, reason)


def sample_of(state: ClusterState, time_s: float) -> ServerSample:
    """What the server's ``/metrics`` page would say."""
    used = sum(load.used_blocks for load in state.loads)
    capacity = sum(load.capacity_blocks for load in state.loads)
    return ServerSample(
        time_s=time_s,
        kv_usage=used / capacity if capacity else None,
        num_running=float(sum(load.num_running for load in state.loads)),
        num_waiting=float(state.num_waiting),
        num_preemptions=float(sum(one.totals.num_preemptions for one in state.instances)),
        kv_used_blocks=float(used),
        kv_capacity_blocks=float(capacity),
        kv_demand_blocks=float(sum(load.demand_blocks for load in state.loads)),
        num_drops=float(state.num_drops),
        num_restores=float(state.num_restores),
    )
