"""A Chrome trace of a cluster's life: who computed, sent and pulled what, and when.

Every instance writes events to a part of its own while it runs; the front puts the parts and the
transitions together at the end. The clock is the machine's monotonic one. Opens in Perfetto
(ui.perfetto.dev) and ``chrome://tracing``.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from kunserve.cluster.instance.beside_clock import Beside
from kunserve.cluster.trace import ClusterTrace
from kunserve.control.instance.body import AnyWork, HeadWork, StepWork
from kunserve.core.errors import ConfigError
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.core.messages import Activation, Message
from kunserve.core.snapshots import TransitionRecord
from kunserve.core.transfer import KvPull, LayerLoad, LayerPull

logger = logging.getLogger(__name__)

COMPUTE, LINK, TRANSITIONS = 0, 1, 2
"""Rows (threads) of an instance (process): its stage, its links, its transitions."""
_ROWS = {COMPUTE: "stage", LINK: "links", TRANSITIONS: "transitions"}


def part_path(path: Path, instance_id: InstanceId) -> Path:
    """Where an instance writes; a replacement goes on in the same file."""
    return path.with_name(f"{path.name}.{instance_id}.part")


def begin_trace(path: Path, instance_ids: Iterable[InstanceId]) -> None:
    """Forget parts that a killed run left. Raises ConfigError where nothing can be written."""
    try:
        path.write_bytes(b"")
        for instance_id in instance_ids:
            part_path(path, instance_id).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write the trace {path}: {error.strerror}") from None


class InstanceTrace:
    """One instance's events, a line of JSON each."""

    def __init__(self, file: str, me: InstanceId) -> None:
        self._me = me
        self._file = part_path(Path(file), me).open("ab")
        for row, name in _ROWS.items():
            self._write({"ph": "M", "name": "thread_name", "tid": row, "args": {"name": name}})
        title = {"name": f"instance {me}"}
        self._write({"ph": "M", "name": "process_name", "tid": COMPUTE, "args": title})

    def computed(
        self,
        step: AnyWork,
        start_s: float,
        end_s: float,
        cpu_s: float,
        beside: Beside | None = None,
    ) -> None:
        """The stage ran a microbatch; an arrow leads to the same one on the next stage.

        ``cpu_s`` is what the instance's own thread computed meanwhile, whoever else had the core.
        ``beside`` is what it did before, since its last work.
        """
        plan = step.plan
        if beside is not None:
            counts = beside._asdict()
            counts["cpu_us"], counts["asleep_us"] = (
                _us(counts.pop(name)) for name in ("cpu_s", "asleep_s")
            )
            self._instant("beside", start_s, **counts)
        if not isinstance(step, StepWork):
            name = "head" if isinstance(step, HeadWork) else "sample"
            num_rows = plan.num_sampled
            title = f"{name} {plan.step_id}: {num_rows} rows"
            self._span(title, COMPUTE, start_s, end_s, cpu_s, group=plan.group_id, rows=num_rows)
            return
        decodes = sum(chunk.num_tokens == 1 + chunk.num_guesses for chunk in plan.chunks)
        guesses = sum(chunk.num_guesses for chunk in plan.chunks)
        self._span(
            f"step {plan.step_id}: {plan.num_tokens} tokens",
            COMPUTE,
            start_s,
            end_s,
            cpu_s,
            group=plan.group_id,
            decodes=decodes,
            prompt_tokens=plan.num_tokens - decodes - guesses,
            guesses=guesses,
            context=sum(chunk.start for chunk in plan.chunks),
            pairs=sum(c * p + c * (c + 1) // 2 for _, p, c, _ in plan.chunks),
            chunks=len(plan.chunks),
            samples=0 if step.gives_rows else plan.num_sampled,
            layers=list(step.layers),
        )
        if not (step.is_first and step.is_last):
            arrow = "s" if step.is_first else "f" if step.is_last else "t"
            self._write(
                {
                    "ph": arrow,
                    "name": "microbatch",
                    "cat": "microbatch",
                    "id": f"{plan.group_id}.{plan.step_id}",
                    "tid": COMPUTE,
                    "ts": _arrow_us(start_s, end_s, leaves=step.is_first),
                    "bp": "e",
                }
            )

    def sent(self, dst: InstanceId, message: Message, num_bytes: int, now_s: float) -> None:
        """Activations went to the next stage."""
        if isinstance(message, Activation):
            name = f"activations to {dst}"
            self._instant(name, now_s, step=message.plan.step_id, bytes=num_bytes)

    def pulled(self, what: KvPull | LayerPull | LayerLoad, ok: bool, now_s: float) -> None:
        """A run of KV blocks, or layers, came from a peer or disk (or did not)."""
        if isinstance(what, KvPull):
            blocks = [what.first_block, what.end_block]
            name = f"KV from {what.src}"
            self._instant(
                name, now_s, request=what.request_id, blocks=blocks, layers=list(what.layers), ok=ok
            )
        else:
            layers: LayerRange = what.layers
            self._instant(
                f"layers from {'disk' if what.src is None else what.src}",
                now_s,
                layers=list(layers),
                ok=ok,
            )

    def flush(self) -> None:
        """So that little is lost when the process is killed. Called with every report."""
        self._file.flush()

    def close(self) -> None:
        """The instance leaves."""
        self._file.close()

    def _span(
        self, name: str, row: int, start_s: float, end_s: float, cpu_s: float, **args: Any
    ) -> None:
        times = {"ts": _us(start_s), "dur": _us(end_s - start_s), "tdur": _us(cpu_s)}
        self._write({"ph": "X", "name": name, "tid": row, "args": args} | times)

    def _instant(self, name: str, now_s: float, **args: Any) -> None:
        event = {"ph": "i", "s": "t", "name": name, "tid": LINK, "ts": _us(now_s), "args": args}
        self._write(event)

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(event | {"pid": self._me}) + b"\n")


def join_trace(
    path: Path, instance_ids: Iterable[InstanceId], transitions: Iterable[TransitionRecord]
) -> None:
    """Write the whole trace from the parts, which are removed. A part cut off loses its end."""
    events: list[Any] = []
    for instance_id in instance_ids:
        part = part_path(path, instance_id)
        if part.exists():
            for line in part.read_bytes().splitlines():
                try:
                    events.append(msgspec.json.decode(line))
                except msgspec.DecodeError:
                    break
            part.unlink()
    for record in transitions:
        events += _transition_events(record)
    path.write_bytes(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))


def end_trace(
    path: Path, instance_ids: Iterable[InstanceId], transitions: Iterable[TransitionRecord]
) -> None:
    """As ``join_trace``, at the end of a cluster: what cannot be written is told in the log."""
    try:
        join_trace(path, instance_ids, transitions)
    except OSError as error:
        logger.error("cannot write the trace path=%s: %s", path, error.strerror)
    else:
        logger.info("trace written path=%s", path)


class FileTrace(ClusterTrace):
    """The trace of a whole cluster, joined at its end."""

    def __init__(self, file: str) -> None:
        self._path = Path(file)
        self._ids: set[InstanceId] = set()

    def begin(self, started: Iterable[InstanceId], found: Iterable[InstanceId]) -> None:
        """See ``ClusterTrace``."""
        self._ids = {*started, *found}
        begin_trace(self._path, self._ids.difference(found))

    def grew(self, ids: Iterable[InstanceId]) -> None:
        """See ``ClusterTrace``."""
        self._ids.update(ids)

    def end(self, transitions: Iterable[TransitionRecord]) -> None:
        """See ``ClusterTrace``."""
        end_trace(self._path, sorted(self._ids), transitions)


def _transition_events(record: TransitionRecord) -> list[dict[str, Any]]:
    end_s = record.finished_s or record.committed_s or record.started_s
    members = sorted({m for layout in record.groups_before for m in layout.members})
    return [
        {
            "ph": "X",
            "name": f"{record.kind} {record.transition_id}: {record.ending}",
            "pid": member,
            "tid": TRANSITIONS,
            "ts": _us(record.started_s),
            "dur": _us(end_s - record.started_s),
            "args": {"trigger": record.trigger, "moved_bytes": record.moved_bytes},
        }
        for member in members
    ]


def _us(seconds: float) -> float:
    """Microseconds, the format's unit, to the nanosecond."""
    return round(seconds * 1e6, 3)


def _arrow_us(start_s: float, end_s: float, leaves: bool) -> float:
    """Where on a slice an arrow begins or ends: strictly inside, or it is not drawn."""
    start_us, end_us = _us(start_s), _us(end_s)
    return max(start_us, round(end_us - 0.001, 3)) if leaves else start_us
