"""What every instance did when, for ``chrome://tracing`` and Perfetto."""

from pathlib import Path
from typing import Any

import msgspec

from kunserve.control.agent import Work
from kunserve.core.ids import InstanceId
from kunserve.core.snapshots import TransitionRecord


class StepTrace:
    """A watcher of a simulated cluster that writes down steps."""

    def __init__(self) -> None:
        self._events: list[dict[str, object]] = []

    def stepped(self, instance_id: InstanceId, work: Work, start_s: float, end_s: float) -> None:
        """An instance computes."""
        plan = work.step.plan
        self._events.append(
            {
                "name": f"{plan.num_tokens} tokens, {len(plan.chunks)} requests",
                "cat": "step",
                "ph": "X",
                "ts": start_s * 1e6,
                "dur": (end_s - start_s) * 1e6,
                "pid": 0,
                "tid": int(instance_id),
                "args": {
                    "group": int(plan.group_id),
                    "step": int(plan.step_id),
                    "layers": list(work.step.layers),
                },
            }
        )

    def happened(self, kind: str, time_s: float, *details: Any) -> None:
        """Nothing else is drawn."""

    def write(self, path: Path, transitions: tuple[TransitionRecord, ...]) -> None:
        """Steps, and every transition as a span on its members."""
        events = list(self._events)
        for record in transitions:
            end_s = record.finished_s if record.finished_s is not None else record.started_s
            for layout in record.groups_before:
                for member in layout.members:
                    events.append(
                        {
                            "name": f"{record.kind}: {record.outcome}",
                            "cat": "transition",
                            "ph": "X",
                            "ts": record.started_s * 1e6,
                            "dur": (end_s - record.started_s) * 1e6,
                            "pid": 1,
                            "tid": int(member),
                        }
                    )
        path.write_bytes(msgspec.json.encode({"traceEvents": events}))
