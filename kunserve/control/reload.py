"""Getting layers back while the pipeline serves: the first half of a restore (section 4.4)."""

from kunserve.control.seat import Seat
from kunserve.core.ids import InstanceId, TransitionId
from kunserve.core.layout import LayerRange
from kunserve.core.messages import ExchangeProgress, LayersLoaded, LoadLayers, MemberSources


class Reload:
    """One instance's part: vacate the KV tail, map the weights again, fill them."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._clear()

    def _clear(self) -> None:
        self._job: LoadLayers | None = None
        self._is_passed_on = False
        self._missing: list[tuple[LayerRange, InstanceId]] = []
        self._is_loading = False
        self._loaded_bytes = 0
        self._started_s = 0.0
        self._is_cancelled = False
        self._members_back: set[InstanceId] = set()

    @property
    def is_busy(self) -> bool:
        """A load or its cancellation is under way here."""
        return self._is_loading or self._is_cancelled

    def start(self, job: LoadLayers, now_s: float) -> None:
        """From the controller to the leader, or from the leader to a member."""
        seat = self._seat
        if seat.layout is None or seat.layout.group_id != job.group_id:
            return
        self._job = job
        self._started_s = now_s
        if seat.scheduler is None:
            self._load(job, now_s)
            return
        seat.scheduler.set_capacity(min(job.capacity_blocks, seat.capacity_blocks()))

    def pump(self, now_s: float) -> None:
        """On the leader: once the group's KV fits, pass the job on and do the own part."""
        job, seat = self._job, self._seat
        if job is None or self._is_passed_on or seat.scheduler is None:
            return
        if seat.scheduler.used_blocks > job.capacity_blocks:
            return
        self._is_passed_on = True
        assert seat.layout is not None
        for member in seat.layout.members:
            if member != seat.me:
                seat.send(member, job)
        self._load(job, now_s)

    def _load(self, job: LoadLayers, now_s: float) -> None:
        seat = self._seat
        mine = [m for m in job.members if m.instance_id == seat.me]
        if not mine or not mine[0].sources:
            self._answer(now_s, None)
            return
        copies = seat.table.vacate(seat.spec.kv_units)
        if copies is None:
            self._answer(now_s, "live KV does not fit below the mark")
            return
        if copies:
            seat.body.copy_units(copies)
        whole = LayerRange(0, seat.spec.num_layers)
        self._is_loading = True
        seat.table.set_layers(seat.layers, seat.spec.kv_units)
        seat.body.reclaim_layers(whole)
        self._fill(mine[0])
        self._finish_if_filled(now_s)

    def _fill(self, mine: MemberSources) -> None:
        for source in mine.sources:
            self._loaded_bytes += source.layers.num_layers * self._seat.spec.layer_bytes
            if source.instance_id is None:
                self._seat.body.load_layers(source.layers)
            else:
                self._missing.append((source.layers, source.instance_id))
                self._seat.mover.pull_layers(source.layers, source.instance_id)

    def pulled(self, layers: LayerRange, src: InstanceId, ok: bool, now_s: float) -> None:
        """A peer's layers arrived; if the peer could not give them, disk does."""
        if (layers, src) not in self._missing:
            return
        self._missing.remove((layers, src))
        if not ok and not self._is_cancelled:
            self._seat.body.load_layers(layers)
        self._finish_if_filled(now_s)

    def _finish_if_filled(self, now_s: float) -> None:
        if self._missing or not self._is_loading:
            return
        self._is_loading = False
        seat = self._seat
        seat.held = LayerRange(0, seat.spec.num_layers)
        if self._is_cancelled:
            self._give_back()
        else:
            self._answer(now_s, None)

    def _answer(self, now_s: float, refusal: str | None) -> None:
        assert self._job is not None
        self._seat.send(
            None,
            LayersLoaded(
                transition_id=self._job.transition_id,
                instance_id=self._seat.me,
                refusal=refusal,
                loaded_bytes=self._loaded_bytes,
                seconds=now_s - self._started_s,
            ),
        )

    # Cancellation

    def rollback(self, transition_id: TransitionId) -> None:
        """The restore is off: weights become KV again, once nothing writes into them."""
        if self._job is None or self._job.transition_id != transition_id:
            return
        self._is_cancelled = True
        if not self._is_loading:
            self._give_back()

    def _give_back(self) -> None:
        seat, job = self._seat, self._job
        assert seat.layout is not None and job is not None
        seat.keep_only(seat.layers)
        seat.send(
            seat.layout.leader,
            ExchangeProgress(job.transition_id, seat.me, 0, (), 0, is_finished=True),
        )
        if not seat.leads:
            self._clear()

    def member_back(self, message: ExchangeProgress) -> bool:
        """On the leader: a member gave its memory back. True if the message was for us."""
        job, seat = self._job, self._seat
        if job is None or message.transition_id != job.transition_id or not self._is_cancelled:
            return False
        assert seat.layout is not None and seat.scheduler is not None
        self._members_back.add(message.instance_id)
        waits_for = set(seat.layout.members) if self._is_passed_on else {seat.me}
        if self._members_back >= waits_for:
            seat.scheduler.set_capacity(seat.capacity_blocks())
            self._clear()
        return True
