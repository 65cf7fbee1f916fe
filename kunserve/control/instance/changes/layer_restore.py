"""Getting dropped layers back while the pipeline serves: a restoration's first half (paper 4.4).

    (leader: draining ->) preparing -> waiting -> filling -> filled -> the group changes
    preparing -> refused  memory could not be mapped: the controller will call it off
                          any of them, when it is called off -> returning -> over

The leader narrows its ledger before anybody gives KV memory up, lets the steps land that were
planned with more, and widens it when all members have their memory again.
"""

from typing import Literal, TypeAlias

from kunserve.control.instance.changes.change import Change, ChangeOrder, ChangeWord
from kunserve.control.instance.membership import Membership
from kunserve.control.instance.state import InstanceState
from kunserve.core.ids import InstanceId, TransitionId
from kunserve.core.layout import LayerRange
from kunserve.core.messages import LayersDropped, LayersLoaded, LoadLayers, OfferKv, Prepare

Phase: TypeAlias = Literal[
    "draining", "preparing", "waiting", "refused", "filling", "filled", "returning", "over"
]


class LayerRestore(Change):
    """One instance's part: vacate the KV tail, map the weights again, fill them."""

    occupation = "layers are being loaded"

    def __init__(
        self, state: InstanceState, membership: Membership, job: LoadLayers, now_s: float
    ) -> None:
        super().__init__(state)
        self._membership = membership
        self._job = job
        self._started_s = now_s
        self._missing: list[tuple[LayerRange, InstanceId | None]] = []
        """Layers on their way here, and from whom; None is the disk."""
        self._loaded_bytes = 0
        self._remap_s = self._prepare_s = 0.0
        self._is_passed_on = False
        self._is_mapped = False
        self._has_dropped = False
        """The memory has become KV again."""
        self._members_dropped: set[InstanceId] = set()
        self._phase: Phase = "preparing"
        self._num_to_land = 0
        """On the leader: steps under way that were planned before its ledger was narrowed."""
        scheduler = membership.scheduler
        if scheduler is not None:
            self._phase = "draining"
            self._num_to_land = scheduler.num_in_flight
            scheduler.set_capacity(min(job.capacity_blocks, membership.capacity_blocks))

    @classmethod
    def begin(
        cls,
        state: InstanceState,
        membership: Membership,
        job: LoadLayers,
        obstacle: str | None,
        now_s: float,
    ) -> "LayerRestore | None":
        """From the controller to the leader, or from the leader to a member; None if refused."""
        refusal = obstacle or _find_refusal(state, membership, job)
        if refusal is None:
            return cls(state, membership, job, now_s)
        _report_refusal(state, job, refusal)
        if membership.scheduler is None:
            _report_dropped(state, membership, job.transition_id)
        return None

    @property
    def change_id(self) -> TransitionId:
        """Of the transition that follows."""
        return self._job.transition_id

    @property
    def phase(self) -> Phase:
        """How far it is."""
        return self._phase

    @property
    def is_over(self) -> bool:
        """It was called off, and everything is as before."""
        return self._phase == "over"

    @property
    def is_loading(self) -> bool:
        """Memory is between two groups until all is loaded."""
        return self._phase != "filled"

    def precedes(self, order: ChangeOrder) -> bool:
        """Whether this has loaded the layers that the transition needs."""
        is_next = isinstance(order, Prepare) and order.transition_id == self.change_id
        return is_next and self._phase == "filled"

    def on(self, message: ChangeWord | OfferKv, now_s: float) -> None:
        """On the leader: a member's weights are KV memory again, or never were anything else."""
        if isinstance(message, LayersDropped):
            self._count_dropped(message.instance_id)

    def step_landed(self) -> None:
        """One fewer of those that were planned with more memory."""
        if self._num_to_land:
            self._num_to_land -= 1

    def advance(self, now_s: float) -> None:
        """Go on as far as possible. Memory changes between steps only."""
        if self._phase == "draining" and not self._num_to_land:
            self._pass_on()
        if self._state.is_running:
            return
        if self._phase == "preparing" and not self.is_preparing:
            self.prepare()
        if self._phase == "waiting":
            self._map_layers()
        if self._phase == "filling" and not self._missing:
            self._finish(now_s)
        if self._phase == "returning" and not self._has_dropped:
            self._drop_again()

    def _pass_on(self) -> None:
        self._phase, self._is_passed_on = "preparing", True
        for member in self._membership.layout.members:
            if member != self._state.me:
                self._state.send(member, self._job)

    @property
    def is_preparing(self) -> bool:
        """Memory is mapped a second time, some granules at once."""
        return self._phase == "preparing" and self._state.body.memory.is_preparing

    def prepare(self) -> Change:
        """A piece of it; then weights wait for KV to be gone, between two steps."""
        memory = self._state.body.memory
        refusal = memory.prepare(self._state.whole_model)
        if refusal is not None:
            self._phase = "refused"
            _report_refusal(self._state, self._job, refusal)
        elif not memory.is_preparing:
            self._phase = "waiting"
        return self

    def _map_layers(self) -> None:
        """Once live KV fits below the mark (released blocks may still be here), map weights."""
        state = self._state
        copies = state.table.vacate(state.spec.kv_units)
        if copies is None:
            return
        state.copy_units(copies)
        self._phase, self._is_mapped = "filling", True
        state.table.set_layers(self._membership.layers, state.spec.kv_units)
        remap = state.body.memory.reclaim(state.whole_model)
        self._remap_s, self._prepare_s = remap.seconds, remap.prepare_s
        for member in self._job.members:
            if member.instance_id == state.me:
                for source in member.sources:
                    self._loaded_bytes += source.layers.num_layers * state.spec.layer_bytes
                    self._missing.append((source.layers, source.instance_id))
                    state.mover.pull_layers(source.layers, source.instance_id)

    def pulled_layers(self, layers: LayerRange, src: InstanceId | None, ok: bool) -> None:
        """A peer's layers arrived; if the peer could not give them, disk does."""
        if (layers, src) not in self._missing:
            return
        self._missing.remove((layers, src))
        if not ok and self._phase == "filling":
            assert src is not None, layers
            self._missing.append((layers, None))
            self._state.mover.pull_layers(layers, None)

    def _finish(self, now_s: float) -> None:
        state = self._state
        self._phase = "filled"
        state.held = state.whole_model
        state.mover.offer_layers(state.held)
        message = LayersLoaded(
            transition_id=self.change_id,
            instance_id=state.me,
            refusal=None,
            loaded_bytes=self._loaded_bytes,
            remap_s=self._remap_s,
            prepare_s=self._prepare_s,
            seconds=now_s - self._started_s,
        )
        state.send(None, message)

    def check(self) -> None:
        """Assert that the ledger is narrow from the first moment to the last."""
        assert self._is_mapped or self._phase not in ("filling", "filled"), self._phase
        scheduler = self._membership.scheduler
        if scheduler is not None:
            capacity_blocks = self._membership.capacity_blocks
            if not self.is_over:
                capacity_blocks = min(self._job.capacity_blocks, capacity_blocks)
            assert scheduler.capacity_blocks == capacity_blocks, (self._phase, capacity_blocks)

    # Called off

    def roll_back(self) -> Change:
        """The restore is off: nothing writes into the weights any more, and they become KV."""
        self._phase = "returning"
        self._missing.clear()
        if self._is_mapped:
            self._state.mover.cancel_layers()
        else:
            self._state.body.memory.prepare(self._state.held)
        return self

    def _drop_again(self) -> None:
        state = self._state
        if self._is_mapped:
            state.held = state.whole_model
        state.keep_only(self._membership.layers)
        self._has_dropped = True
        _report_dropped(state, self._membership, self.change_id)
        if self._membership.scheduler is None:
            self._phase = "over"

    def _count_dropped(self, member: InstanceId) -> None:
        self._members_dropped.add(member)
        scheduler, layout = self._membership.scheduler, self._membership.layout
        involved = set(layout.members) if self._is_passed_on else {self._state.me}
        if scheduler is not None and self._members_dropped >= involved:
            scheduler.set_capacity(self._membership.capacity_blocks)
            self._phase = "over"


def _report_refusal(state: InstanceState, job: LoadLayers, refusal: str) -> None:
    """Tell the controller that nothing will be loaded here."""
    state.send(
        None, LayersLoaded(job.transition_id, state.me, refusal, 0, remap_s=0.0, seconds=0.0)
    )


def _report_dropped(
    state: InstanceState, membership: Membership, transition_id: TransitionId
) -> None:
    """Tell the leader that nothing is loaded here for a restore."""
    state.send(membership.layout.leader, LayersDropped(transition_id, state.me))


def _find_refusal(state: InstanceState, membership: Membership, job: LoadLayers) -> str | None:
    """Why the layers cannot be loaded here, or None."""
    if job.capacity_blocks * membership.layers.num_layers > state.spec.kv_units:
        return f"{job.capacity_blocks} blocks do not fit into {state.spec.kv_units} units"
    scheduler = membership.scheduler
    if scheduler is not None and scheduler.used_blocks > job.capacity_blocks:
        return f"{scheduler.used_blocks} blocks are in use, not {job.capacity_blocks}"
    return None
