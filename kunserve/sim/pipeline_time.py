"""How much of a pipeline's time its stages stand idle: the bubble ratio."""

from dataclasses import dataclass

from kunserve.core.ids import GroupId
from kunserve.core.layout import GroupLayout


@dataclass(slots=True)
class _Pipe:
    num_running: int = 0
    changed_s: float = 0.0


class PipelineTime:
    """Sums over all groups of more than one stage.

    A stage's time counts while any stage of its group computes: a group without work has no
    bubbles.
    """

    def __init__(self) -> None:
        self._pipes: dict[GroupId, _Pipe] = {}
        self.busy_s = 0.0
        self.stage_s = 0.0

    @property
    def bubble_ratio(self) -> float | None:
        """Idle stage time over stage time; None when no pipeline ever ran."""
        return None if self.stage_s == 0.0 else 1.0 - self.busy_s / self.stage_s

    def begin(self, layout: GroupLayout, now_s: float) -> None:
        """A stage starts to compute."""
        self._advance(layout, now_s).num_running += 1

    def end(self, layout: GroupLayout, now_s: float) -> None:
        """A stage is done."""
        pipe = self._advance(layout, now_s)
        pipe.num_running -= 1
        if pipe.num_running == 0:
            del self._pipes[layout.group_id]

    def _advance(self, layout: GroupLayout, now_s: float) -> _Pipe:
        pipe = self._pipes.get(layout.group_id)
        if pipe is None:
            pipe = self._pipes[layout.group_id] = _Pipe(0, now_s)
        if pipe.num_running:
            elapsed_s = now_s - pipe.changed_s
            self.busy_s += pipe.num_running * elapsed_s
            self.stage_s += len(layout.stages) * elapsed_s
        pipe.changed_s = now_s
        return pipe
