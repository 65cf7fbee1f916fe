"""What may change on an instance beside steps, as everybody else sees it.

A drop or a restoration (``transition``), the loading of layers before a restoration
(``layer_restore``), and either end of a live migration are the four kinds.
"""

from typing import TypeAlias

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

ChangeOrder: TypeAlias = Prepare | LoadLayers | Migrate | OfferKv
"""Asks an instance to begin a change."""
ChangeWord: TypeAlias = (
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


class Change:
    """One change. This class itself is none: a kind of change says what it does otherwise."""

    occupation: str | None = None
    """Why nothing else can begin meanwhile; None if it can."""
    is_exchanging = False
    """Whether KV is under way to or from here in an exchange."""

    def __init__(self, state: InstanceState) -> None:
        self._state = state

    @property
    def change_id(self) -> TransitionId | None:
        """Of the transition or migration; None if nothing changes."""
        return None

    @property
    def is_over(self) -> bool:
        """Nothing of the change is left here."""
        return False

    @property
    def is_quiescing(self) -> bool:
        """Whether no further step of the present group may start here."""
        return False

    @property
    def has_switched(self) -> bool:
        """Whether the instance has entered the new group of a transition under way."""
        return False

    @property
    def is_preparing(self) -> bool:
        """Whether ``prepare`` has something to do."""
        return False

    def prepare(self) -> "Change":
        """Have memory do a piece of what was prepared; what is under way then."""
        return self

    @property
    def is_loading(self) -> bool:
        """Whether memory is neither as in the present group nor as in the next one."""
        return False

    def precedes(self, order: ChangeOrder) -> bool:
        """Whether what is asked for takes this change's place."""
        return False

    def on(self, message: ChangeWord | OfferKv, now_s: float) -> None:
        """Word of the change. What does not concern this end of it is void."""

    def advance(self, now_s: float) -> None:
        """Take whatever step has become possible."""

    def roll_back(self) -> "Change":
        """Forget what was prepared; what is under way then."""
        return self

    def pulled_kv(self, piece: KvPull, ok: bool) -> None:
        """The mover filled a piece, or its source would not give it."""

    def pulled_layers(self, layers: LayerRange, src: InstanceId | None, ok: bool) -> None:
        """The mover filled weights, or could not."""

    def step_landed(self) -> None:
        """On the leader: a step's result has come. They come in order."""

    def accept(self, message: Submit) -> bool:
        """Whether the request's KV is on its way here; then it runs as soon as that is here."""
        return False

    def awaits(self, request_id: RequestId) -> bool:
        """Whether the request was accepted and its KV is still on its way here."""
        return False

    def abort(self, request_id: RequestId) -> bool:
        """The client is gone. True if nothing of the request is left here."""
        return False

    def release(self, request_id: RequestId) -> None:
        """Free a request's blocks, whatever is being done with them."""
        self._state.table.release(request_id)

    def swap_out(self, request_id: RequestId) -> None:
        """Some of the request's blocks go to host memory with the next step."""

    def evict(self, prefix_id: PrefixId, end_block: int) -> None:
        """Free blocks of the prefix cache, whatever is being done with them."""
        self._state.table.evict(prefix_id, end_block)

    def make_room(self) -> None:
        """A step lacks units because of blocks in transfer."""

    def check(self) -> None:
        """Assert the accounts of the change."""
