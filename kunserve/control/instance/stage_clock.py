"""How long a pipeline's stages compute, and how long they could have."""

from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout
from kunserve.core.snapshots import StageTime


class StageClock:
    """One instance's account of the pipeline it stands in; begins anew in every group.

    Only the leader knows when the pipeline has work (microbatches in flight): a stage's time in
    which it does not compute then is a bubble. Without work there are none.
    """

    def __init__(self, me: InstanceId) -> None:
        self._me = me
        self._group: GroupId | None = None
        self._num_stages = 1
        self._busy_s = 0.0
        self._active_s: float | None = None
        self._seen_s = 0.0
        self._was_active = False
        self._reported: StageTime | None = None

    def computed(self, seconds: float) -> None:
        """A step of this stage took that long."""
        self._busy_s += seconds

    def look(self, layout: GroupLayout | None, num_in_flight: int | None, now_s: float) -> None:
        """Called between steps, often; ``num_in_flight`` is None on a follower."""
        if layout is None or layout.group_id != self._group:
            self._group = None if layout is None else layout.group_id
            self._num_stages = 1 if layout is None else len(layout.stages)
            self._busy_s, self._was_active = 0.0, False
            self._active_s = None if num_in_flight is None else 0.0
        elif self._active_s is not None and self._was_active:
            self._active_s += now_s - self._seen_s
        self._was_active = bool(num_in_flight)
        self._seen_s = now_s

    def report(self) -> StageTime | None:
        """The account, if this is a pipeline and there is news."""
        if self._group is None or self._num_stages == 1:
            return None
        now = StageTime(self._me, self._group, self._num_stages, self._busy_s, self._active_s)
        if now == self._reported:
            return None
        self._reported = now
        return now
