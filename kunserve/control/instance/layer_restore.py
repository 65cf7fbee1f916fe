"""Getting layers back while the pipeline serves: the first half of a restore (section 4.4).

    idle -> (leader: draining ->) waiting -> filling -> filled -> (the group changes) idle
                                 any of them, on a rollback -> returning -> idle

The leader narrows its ledger before anybody gives KV memory up, lets the steps land that were
planned with more, and widens it when all members have their memory again.
"""

from typing import Literal, TypeAlias

from kunserve.control.instance.state import InstanceState
from kunserve.core.ids import InstanceId, TransitionId
from kunserve.core.layout import LayerRange
from kunserve.core.messages import ExchangeProgress, LayersLoaded, LoadLayers

Phase: TypeAlias = Literal["idle", "draining", "waiting", "filling", "filled", "returning"]

MAX_CANCELLED = 64
"""Rollbacks remembered in case their ``LoadLayers`` is still on its way here."""


class LayerRestore:
    """One instance's part: vacate the KV tail, map the weights again, fill them."""

    def __init__(self, seat: InstanceState) -> None:
        self._seat = seat
        self._cancelled: dict[TransitionId, None] = {}
        self.clear()

    def clear(self) -> None:
        """The job is over: done with, or the groups have changed."""
        self._phase: Phase = "idle"
        self._job: LoadLayers | None = None
        self._missing: list[tuple[LayerRange, InstanceId]] = []
        self._from_disk: list[LayerRange] = []
        """Layers that the body must load itself, between two steps."""
        self._loaded_bytes = 0
        self._remap_s = 0.0
        self._started_s = 0.0
        self._num_to_land = 0
        """On the leader: steps under way that were planned before its ledger was narrowed."""
        self._is_passed_on = False
        self._is_mapped = False
        self._is_back = False
        """The memory has become KV again."""
        self._members_back: set[InstanceId] = set()

    @property
    def is_busy(self) -> bool:
        """A load or its cancellation is under way here."""
        return self._phase in ("draining", "waiting", "filling", "returning")

    def start(self, job: LoadLayers, is_regrouping: bool, now_s: float) -> None:
        """From the controller to the leader, or from the leader to a member."""
        seat = self._seat
        if seat.layout is None or seat.layout.group_id != job.group_id:
            return
        if job.transition_id in self._cancelled:
            self._tell_back(job)
            return
        if self._job is not None and self._job.group_id != job.group_id:
            self.clear()  # that restore is done: the groups have changed since
        refusal = self._refusal(job, is_regrouping)
        if refusal is not None:
            self._answer(job, now_s, refusal)
            if not seat.leads:
                self._tell_back(job)
            return
        self.clear()
        self._job, self._phase, self._started_s = job, "waiting", now_s
        if seat.scheduler is not None:
            self._phase = "draining"
            self._num_to_land = seat.scheduler.num_in_flight
            seat.scheduler.set_capacity(min(job.capacity_blocks, seat.capacity_blocks()))

    def _refusal(self, job: LoadLayers, is_regrouping: bool) -> str | None:
        seat = self._seat
        if is_regrouping or self._phase != "idle":
            return "another transition is under way"
        if job.capacity_blocks * seat.layers.num_layers > seat.spec.kv_units:
            return f"{job.capacity_blocks} blocks do not fit into {seat.spec.kv_units} units"
        if seat.scheduler is not None and seat.scheduler.used_blocks > job.capacity_blocks:
            return f"{seat.scheduler.used_blocks} blocks are in use, not {job.capacity_blocks}"
        return None

    def step_landed(self) -> None:
        """On the leader: a step's result has come. They come in order."""
        if self._num_to_land:
            self._num_to_land -= 1

    def pump(self, now_s: float) -> None:
        """Go on as far as possible. Memory changes between steps only."""
        if self._phase == "draining" and not self._num_to_land:
            self._pass_on()
        if self._seat.is_running:
            return
        if self._phase == "waiting":
            self._map_layers()
        if self._phase == "filling":
            self._load_from_disk()
            if not self._missing:
                self._phase = "filled"
                self._seat.held = LayerRange(0, self._seat.spec.num_layers)
                self._seat.mover.offer_layers(self._seat.held)
                assert self._job is not None
                self._answer(self._job, now_s, None)
        if self._phase == "returning" and not self._is_back and not self._missing:
            self._give_back()

    def _pass_on(self) -> None:
        seat, job = self._seat, self._job
        assert seat.layout is not None and job is not None
        self._phase, self._is_passed_on = "waiting", True
        for member in seat.layout.members:
            if member != seat.me:
                seat.send(member, job)

    def _map_layers(self) -> None:
        """Once live KV fits below the mark (released blocks may still be here), map weights."""
        seat, job = self._seat, self._job
        assert job is not None
        copies = seat.table.vacate(seat.spec.kv_units)
        if copies is None:
            return
        if copies:
            seat.body.copy_units(copies)
        self._phase, self._is_mapped = "filling", True
        whole = LayerRange(0, seat.spec.num_layers)
        seat.table.set_layers(seat.layers, seat.spec.kv_units)
        self._remap_s = seat.body.reclaim_layers(whole).seconds
        for member in job.members:
            if member.instance_id == seat.me:
                for source in member.sources:
                    self._loaded_bytes += source.layers.num_layers * seat.spec.layer_bytes
                    if source.instance_id is None:
                        self._from_disk.append(source.layers)
                    else:
                        self._missing.append((source.layers, source.instance_id))
                        seat.mover.pull_layers(source.layers, source.instance_id)

    def _load_from_disk(self) -> None:
        from_disk, self._from_disk = self._from_disk, []
        for layers in from_disk:
            self._seat.body.load_layers(layers)

    def pulled(self, layers: LayerRange, src: InstanceId, ok: bool) -> None:
        """A peer's layers arrived; if the peer could not give them, disk does."""
        if (layers, src) not in self._missing:
            return
        self._missing.remove((layers, src))
        if not ok:
            self._from_disk.append(layers)

    def _answer(self, job: LoadLayers, now_s: float, refusal: str | None) -> None:
        self._seat.send(
            None,
            LayersLoaded(
                transition_id=job.transition_id,
                instance_id=self._seat.me,
                refusal=refusal,
                loaded_bytes=0 if refusal else self._loaded_bytes,
                remap_s=self._remap_s,
                seconds=0.0 if refusal else now_s - self._started_s,
            ),
        )

    # Cancellation

    def rollback(self, transition_id: TransitionId) -> None:
        """The restore is off: weights become KV again, once nothing writes into them."""
        self._cancelled[transition_id] = None
        if len(self._cancelled) > MAX_CANCELLED:
            self._cancelled.pop(next(iter(self._cancelled)))
        if self._job is not None and self._job.transition_id == transition_id:
            self._phase = "returning"

    def _give_back(self) -> None:
        seat, job = self._seat, self._job
        assert job is not None
        if self._is_mapped:
            seat.held = LayerRange(0, seat.spec.num_layers)
        seat.keep_only(seat.layers)
        self._is_back = True
        self._tell_back(job)
        if not seat.leads:
            self.clear()

    def _tell_back(self, job: LoadLayers) -> None:
        seat = self._seat
        assert seat.layout is not None
        message = ExchangeProgress(job.transition_id, seat.me, 0, (), 0, is_finished=True)
        seat.send(seat.layout.leader, message)

    def member_back(self, message: ExchangeProgress) -> bool:
        """On the leader: a member gave its memory back. True if the message was for us."""
        job, seat = self._job, self._seat
        if job is None or message.transition_id != job.transition_id:
            return False
        assert seat.layout is not None and seat.scheduler is not None
        self._members_back.add(message.instance_id)
        involved = set(seat.layout.members) if self._is_passed_on else {seat.me}
        if self._members_back >= involved:
            seat.scheduler.set_capacity(seat.capacity_blocks())
            self.clear()
        return True
