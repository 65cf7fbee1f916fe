"""What changes on an instance beside steps: one thing at a time.

A drop or a restoration (``transition``), the loading of layers before a restoration
(``layer_restore``), or either end of a live migration. A restoration's transition takes the place
of the change that has loaded its layers; everything else waits, or is refused.
"""

from typing import TypeAlias

from kunserve.control.instance.changes.layer_restore import LayerRestore
from kunserve.control.instance.changes.migration_source import MigrationSource
from kunserve.control.instance.changes.migration_target import MigrationTarget
from kunserve.control.instance.changes.transition import Enter, TransitionMember
from kunserve.control.instance.membership import Membership
from kunserve.control.instance.state import InstanceState
from kunserve.core.ids import InstanceId, PrefixId, RequestId, TransitionId
from kunserve.core.layout import LayerRange
from kunserve.core.messages import (
    Commit,
    EndMigration,
    ExchangeProgress,
    HandOff,
    Handover,
    KvDropped,
    KvMoved,
    LayersDropped,
    LoadLayers,
    Migrate,
    OfferKv,
    OfferRefused,
    OfferTaken,
    Prepare,
    Submit,
    WithdrawKv,
)
from kunserve.core.transfer import KvPull

Change: TypeAlias = TransitionMember | LayerRestore | MigrationSource | MigrationTarget
ChangeOrder: TypeAlias = Prepare | LoadLayers | Migrate | OfferKv
"""Asks an instance to begin a change."""
ChangeMessage: TypeAlias = (
    Commit
    | Handover
    | KvMoved
    | KvDropped
    | ExchangeProgress
    | LayersDropped
    | OfferTaken
    | OfferRefused
    | HandOff
    | EndMigration
    | WithdrawKv
)
"""Says something about the change under way."""


class ChangeSlot:
    """Owner of the rule that one change is under way at a time."""

    def __init__(self, state: InstanceState, enter: Enter) -> None:
        """``enter`` has the instance stand in a new group."""
        self._state = state
        self._enter = enter
        self._change: Change | None = None

    @property
    def change(self) -> Change | None:
        """What is under way."""
        return self._change

    @property
    def change_id(self) -> TransitionId | None:
        """Of the transition or migration under way."""
        return None if self._change is None else self._change.change_id

    @property
    def is_quiescing(self) -> bool:
        """Whether no further step of the present group may start here."""
        return isinstance(self._change, TransitionMember) and self._change.is_quiescing

    @property
    def has_switched(self) -> bool:
        """Whether a transition is under way whose new group the instance has entered."""
        return isinstance(self._change, TransitionMember) and self._change.has_switched

    @property
    def is_exchanging(self) -> bool:
        """Whether KV is under way to or from here in an exchange."""
        return isinstance(self._change, TransitionMember) and self._change.is_exchanging

    def clear(self) -> None:
        """Whatever was under way is void: the instance starts anew."""
        self._change = None

    # Messages

    def begin(self, order: ChangeOrder, membership: Membership, now_s: float) -> None:
        """Begin what is asked for, or answer why not."""
        state, change = self._state, self._change
        obstacle = None if change is None else change.occupation
        begun: Change | None
        match order:
            case Prepare():
                restored = None
                if isinstance(change, LayerRestore) and change.precedes(order):
                    restored, obstacle = change, None
                begun = TransitionMember.begin(
                    state, membership, self._enter, order, restored, obstacle, now_s
                )
            case LoadLayers():
                begun = LayerRestore.begin(state, membership, order, obstacle, now_s)
            case Migrate():
                begun = MigrationSource.begin(state, membership, order, obstacle)
            case OfferKv() if (
                isinstance(change, MigrationTarget) and change.change_id == order.migration_id
            ):
                begun = None
                change.extend(order)
            case OfferKv():
                begun = MigrationTarget.begin(state, membership, order, obstacle)
        if begun is not None:
            self._change = begun

    def read(self, message: ChangeMessage, now_s: float) -> None:
        """Word of the change under way. What does not concern this end of it is void."""
        match self._change, message:
            case TransitionMember() as transition, Commit():
                transition.commit(now_s)
            case TransitionMember() as transition, Handover():
                transition.read_handover(message, now_s)
            case TransitionMember() as transition, KvMoved() | KvDropped() | ExchangeProgress():
                transition.read(message, now_s)
            case LayerRestore() as restore, LayersDropped():
                restore.count_dropped(message.instance_id)
            case TransitionMember(restored=LayerRestore() as restore), LayersDropped():
                restore.count_dropped(message.instance_id)
            case MigrationSource() as source, OfferTaken():
                source.offer_taken(message.end_block)
            case MigrationSource() as source, OfferRefused():
                source.offer_refused()
            case MigrationSource() as source, HandOff():
                source.hand_off()
            case MigrationSource() as source, EndMigration():
                source.give_up("ended by the controller")
            case MigrationTarget() as target, EndMigration() | WithdrawKv():
                target.give_up()

    def roll_back(self, transition_id: TransitionId) -> None:
        """Forget what was prepared, and give back what was loaded for it."""
        change = self._change
        if change is None or change.change_id != transition_id:
            return
        if isinstance(change, TransitionMember):
            change = self._change = change.roll_back()
        if isinstance(change, LayerRestore):
            change.call_off()

    # Steps and pulls

    def advance(self, now_s: float) -> None:
        """Let the change take whatever step has become possible."""
        self._forget_if_over()
        if self._change is not None:
            self._change.advance(now_s)
            self._forget_if_over()

    def pulled_kv(self, piece: KvPull, ok: bool) -> None:
        """The mover filled a piece, or its source would not give it."""
        if isinstance(self._change, TransitionMember | MigrationTarget):
            self._change.pulled(piece, ok)

    def pulled_layers(self, layers: LayerRange, src: InstanceId | None, ok: bool) -> None:
        """The mover filled weights, or could not."""
        if isinstance(self._change, LayerRestore):
            self._change.pulled(layers, src, ok)

    def step_landed(self) -> None:
        """On the leader: a step's result has come."""
        if isinstance(self._change, LayerRestore):
            self._change.step_landed()

    # Requests

    def accept(self, message: Submit) -> bool:
        """Whether the request's KV is on its way here; then it runs as soon as that is here."""
        return isinstance(self._change, MigrationTarget) and self._change.accept(message)

    def awaits(self, request_id: RequestId) -> bool:
        """Whether the request was accepted and its KV is still on its way here."""
        return isinstance(self._change, MigrationTarget) and self._change.awaits(request_id)

    def abort(self, request_id: RequestId) -> bool:
        """The client is gone. True if nothing of the request is left here."""
        match self._change:
            case TransitionMember() as transition:
                transition.abort(request_id)
            case MigrationSource() as source:
                source.request_ends(request_id, "aborted")
            case MigrationTarget() as target:
                return target.abort(request_id)
        return False

    def release(self, request_id: RequestId) -> None:
        """Free a request's blocks, whatever is being done with them."""
        if isinstance(self._change, TransitionMember):
            self._change.release(request_id)
            return
        if isinstance(self._change, MigrationSource):
            self._change.request_ends(request_id, "ended or preempted")
            self._forget_if_over()
        self._state.table.release(request_id)

    def evict(self, prefix_id: PrefixId, end_block: int) -> None:
        """Free blocks of the prefix cache, whatever is being done with them."""
        if isinstance(self._change, TransitionMember):
            self._change.evict(prefix_id, end_block)
        else:
            self._state.table.evict(prefix_id, end_block)

    def make_room(self) -> None:
        """A step lacks units because of blocks in transfer."""
        assert self._change is not None, self._state.table.free_units
        if isinstance(self._change, MigrationSource):
            self._change.make_room()
            self._forget_if_over()

    def _forget_if_over(self) -> None:
        if self._change is not None and self._change.is_over:
            self._change = None

    def check(self) -> None:
        """Assert the accounts of the change, and that it goes on."""
        if isinstance(self._change, TransitionMember):
            self._change.check()
        assert self._change is None or not self._change.is_over, self._change
