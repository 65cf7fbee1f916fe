"""What every instance did when, for Perfetto (ui.perfetto.dev) and ``chrome://tracing``."""

from pathlib import Path
from typing import Any

import msgspec

from kunserve.control.instance.body import StepWork
from kunserve.control.instance.work import Work
from kunserve.core.ids import InstanceId
from kunserve.core.snapshots import TransitionRecord

STAGE, TRANSITIONS = 0, 1
"""Rows (threads) of an instance (process)."""
_ROWS = {STAGE: "stage", TRANSITIONS: "transitions"}


class StepTrace:
    """A watcher of a simulated cluster that writes down steps."""

    def __init__(self) -> None:
        self._events: list[dict[str, object]] = []
        self._instances: set[InstanceId] = set()

    def happened(self, kind: str, time_s: float, *details: Any) -> None:
        """See ``Watcher``."""
        if kind == "step":
            self._step(time_s, *details)

    def _step(self, start_s: float, instance_id: InstanceId, work: Work, end_s: float) -> None:
        """An instance computes; an arrow leads to the same microbatch on the next stage."""
        step, plan = work.step, work.step.plan
        self._instances.add(instance_id)
        if not isinstance(step, StepWork):
            if end_s > start_s:
                self._events.append(_span("head", instance_id, STAGE, start_s, end_s))
            return
        self._events.append(
            _span(
                f"{plan.num_tokens} tokens, {len(plan.chunks)} requests",
                instance_id,
                STAGE,
                start_s,
                end_s,
                group=int(plan.group_id),
                step=int(plan.step_id),
                layers=list(step.layers),
            )
        )
        if not (step.is_first and step.is_last):
            self._events.append(
                {
                    "ph": "s" if step.is_first else "f" if step.is_last else "t",
                    "name": "microbatch",
                    "cat": "microbatch",
                    "id": f"{plan.group_id}.{plan.step_id}",
                    "pid": int(instance_id),
                    "tid": STAGE,
                    "ts": _us(start_s),
                    "bp": "e",
                }
            )

    def write(self, path: Path, transitions: tuple[TransitionRecord, ...]) -> None:
        """Steps, and every transition as a span on its members."""
        events = list(self._events)
        instances = set(self._instances)
        for record in transitions:
            end_s = record.finished_s if record.finished_s is not None else record.started_s
            for member in (m for layout in record.groups_before for m in layout.members):
                name = f"{record.kind} {record.transition_id}: {record.ending}"
                instances.add(member)
                events.append(_span(name, member, TRANSITIONS, record.started_s, end_s))
        for instance_id in sorted(instances):
            events.append(_name("process_name", instance_id, STAGE, f"instance {instance_id}"))
            for row, name in _ROWS.items():
                events.append(_name("thread_name", instance_id, row, name))
        path.write_bytes(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))


def _span(
    name: str, instance_id: InstanceId, row: int, start_s: float, end_s: float, **args: object
) -> dict[str, object]:
    times = {"ts": _us(start_s), "dur": _us(end_s - start_s)}
    return {"ph": "X", "name": name, "pid": int(instance_id), "tid": row, "args": args} | times


def _name(kind: str, instance_id: InstanceId, row: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": int(instance_id), "tid": row, "args": {"name": name}}


def _us(seconds: float) -> float:
    """Microseconds, the format's unit, to the nanosecond."""
    return round(seconds * 1e6, 3)
