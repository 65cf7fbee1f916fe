"""What the instances' processes use, as ``process_*`` tells of the front's own."""

from collections.abc import Mapping

from prometheus_client import ProcessCollector

from kunserve.core.ids import InstanceId
from kunserve.engine.memory.free_memory import beside_bytes, children_of
from kunserve.server.telemetry.metric_row import Row, by_engine, counter, gauge


class ProcessMetrics:
    """Asked at each scrape. A process that is gone counts with what was last known of it."""

    def __init__(self) -> None:
        self.cpu_s: dict[InstanceId, float] = {}
        """Of every instance that runs or ran."""
        self.resident_bytes: dict[InstanceId, float] = {}
        self._last: dict[InstanceId, tuple[int, float]] = {}
        """Process id and CPU seconds."""
        self._past_s: dict[InstanceId, float] = {}

    def look(self, pids: Mapping[InstanceId, int], borrowed: Mapping[InstanceId, int]) -> None:
        """Ask the processes that run. What they have ``borrowed`` counts with other instances."""
        self.resident_bytes = {}
        for instance_id, pid in pids.items():
            used = _used_by(pid)
            cpu_s = used.get("process_cpu_seconds_total")
            if cpu_s is None:
                continue
            ranks = children_of(pid)
            cpu_s += sum(_used_by(one).get("process_cpu_seconds_total", 0.0) for one in ranks)
            last_pid, last_s = self._last.get(instance_id, (pid, 0.0))
            if last_pid != pid:
                self._past_s[instance_id] = self._past_s.get(instance_id, 0.0) + last_s
            self._last[instance_id] = (pid, cpu_s)
            self.cpu_s[instance_id] = self._past_s.get(instance_id, 0.0) + cpu_s
            # Rank 0 maps the memory of the others, so only what they have beside it is added.
            own_bytes = used["process_resident_memory_bytes"] - borrowed.get(instance_id, 0)
            self.resident_bytes[instance_id] = own_bytes + beside_bytes(ranks)


ROWS: tuple[Row[ProcessMetrics], ...] = (
    counter(
        "kunserve:instance_cpu_seconds_total",
        "CPU time of the instance's processes, one per rank, and of those before them.",
        lambda own: by_engine(own.cpu_s),
        "engine",
    ),
    gauge(
        "kunserve:instance_resident_memory_bytes",
        "Memory that the instance's processes have in use; what several of them map counts once.",
        lambda own: by_engine(own.resident_bytes),
        "engine",
    ),
)


def _used_by(pid: int) -> dict[str, float]:
    """Empty if there is no such process."""
    families = ProcessCollector(pid=lambda: pid, registry=None).collect()
    return {sample.name: sample.value for family in families for sample in family.samples}
