"""A running request comes to an instance: memory is set aside, its KV pulled (live migration).

The request is this instance's once the controller submits it here. It runs as soon as its last
blocks have arrived; if they cannot be had it is computed again from its tokens.
"""

from kunserve.control.group.scheduler import Scheduler
from kunserve.control.instance.changes.change import Change, ChangeWord
from kunserve.control.instance.changes.kv_transfer import KvImport
from kunserve.control.instance.membership import Membership
from kunserve.control.instance.state import InstanceState
from kunserve.core.ids import RequestId, TransitionId
from kunserve.core.messages import (
    EndMigration,
    OfferKv,
    OfferRefused,
    OfferTaken,
    SequenceState,
    Submit,
    WithdrawKv,
)
from kunserve.core.request import Request
from kunserve.core.transfer import KvPull
from kunserve.policy.exchange.moves import choose_piece_blocks
from kunserve.policy.exchange.order import cut_pieces


class MigrationTarget(Change):
    """One request's way in."""

    occupation = "a request migrates"

    def __init__(self, state: InstanceState, scheduler: Scheduler, offer: OfferKv) -> None:
        super().__init__(state)
        self._scheduler = scheduler
        self._offer = offer
        self._kv = KvImport(
            state,
            offer.migration_id,
            offer.request_id,
            ((offer.source, state.whole_model),),
            has_part=False,
        )
        self._request: Request | None = None
        """Once it is this instance's."""
        self._wanted_blocks = 0
        """To have, as far as is known; ``_asked_blocks`` of them are here or on their way."""
        self._asked_blocks = 0
        self._confirmed_blocks: int | None = None
        """That the source knows to be here."""
        self._is_over = False

    @classmethod
    def begin(
        cls, state: InstanceState, membership: Membership, offer: OfferKv, obstacle: str | None
    ) -> "MigrationTarget | None":
        """The source's first offer; None if the request cannot come."""
        scheduler = membership.scheduler
        if (
            obstacle is None
            and scheduler is not None
            and membership.layout.group_id == offer.group_id
            and len(membership.layout.stages) == 1
            and offer.largest_blocks <= membership.capacity_blocks
            and not scheduler.migration.knows(offer.request_id)
            and state.table.num_blocks(offer.request_id) == 0
        ):
            target = cls(state, scheduler, offer)
            target._extend(offer)
            return None if target._is_over else target
        state.send(offer.source, OfferRefused(offer.migration_id))
        return None

    @property
    def change_id(self) -> TransitionId:
        """Which migration it is."""
        return self._offer.migration_id

    @property
    def is_over(self) -> bool:
        """Nothing of the migration is left here but, perhaps, the request."""
        return self._is_over

    def on(self, message: ChangeWord | OfferKv, now_s: float) -> None:
        """The source has more blocks; or it, or the controller, ends it."""
        match message:
            case OfferKv():
                self._extend(message)
            case EndMigration() | WithdrawKv():
                self._give_up()

    def _extend(self, offer: OfferKv) -> None:
        if self._scheduler.migration.reserve(offer.request_id, offer.reserved_blocks):
            self._offer = offer
            self._wanted_blocks = offer.num_blocks
        else:
            self._give_up()

    def accept(self, message: Submit) -> bool:
        """The request is this instance's now; False if nothing of it has come."""
        request = message.request
        if self._is_over or request.request_id != self._offer.request_id:
            return False
        if message.migration_id != self.change_id:
            self._give_up()
            return False
        self._request = request
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        self._wanted_blocks = -(-(num_tokens - 1) // self._state.spec.block_size)
        assert self._wanted_blocks <= self._offer.reserved_blocks, (self._offer, num_tokens)
        return True

    def awaits(self, request_id: RequestId) -> bool:
        """Whether the request is this instance's, and not all of its KV is here."""
        return self._request is not None and request_id == self._request.request_id

    # Taking

    def advance(self, now_s: float) -> None:
        """Pull what is wanted, and confirm what is here."""
        if self._asked_blocks < self._wanted_blocks and not self._pull():
            return
        if self._kv.num_in_flight or self._asked_blocks < self._wanted_blocks:
            return
        if self._request is not None:
            self._finish(self._request)
        elif self._confirmed_blocks != self._wanted_blocks:
            self._confirm()

    def _pull(self) -> bool:
        """Take units for the blocks wanted and pull them; False if that must wait."""
        state = self._state
        first, end = self._asked_blocks, self._wanted_blocks
        if not self._kv.place(first, end, may_compact=not state.is_running):
            # What the prefix cache holds beyond its share goes with the next plan.
            if not (state.is_running or self._scheduler.is_evicting):
                self._give_up()
            return False
        self._asked_blocks = end
        for begin, stop in cut_pieces(end - first, choose_piece_blocks([state.spec])):
            self._kv.pull(first + begin, first + stop)
        return True

    def pulled_kv(self, piece: KvPull, ok: bool) -> None:
        """A piece landed, or its source could not give it."""
        if not self._kv.awaits(piece):
            return
        if ok:
            self._kv.accept(piece)
        else:
            self._give_up()

    def _confirm(self) -> None:
        self._confirmed_blocks = self._wanted_blocks
        self._state.send(self._offer.source, OfferTaken(self.change_id, self._wanted_blocks))

    def _finish(self, request: Request) -> None:
        """All KV is here: the request runs."""
        self._is_over = True
        self._scheduler.migration.unreserve(request.request_id)
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        sequence = SequenceState(
            request, request.output_token_ids, num_tokens - 1, self._wanted_blocks, 0
        )
        self._scheduler.adopt((sequence,))
        self._confirm()

    # Ends

    def abort(self, request_id: RequestId) -> bool:
        """The client is gone; False if the request is not on its way here."""
        if self._request is None or request_id != self._request.request_id:
            return False
        self._free()
        return True

    def _give_up(self) -> None:
        """Free what has come. If the request is this instance's already it is computed again."""
        self._free()
        request = self._request
        if request is not None:
            num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
            self._state.note_preemption(request.request_id, num_tokens - 1)
            self._scheduler.add(request)

    def _free(self) -> None:
        state, request_id = self._state, self._offer.request_id
        self._is_over = True
        self._kv.cancel()
        state.table.release(request_id)
        self._scheduler.migration.unreserve(request_id)
        state.send(self._offer.source, OfferRefused(self.change_id))
