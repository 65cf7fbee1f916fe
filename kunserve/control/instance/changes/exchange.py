"""One instance's part in a coordinated exchange: the KV it gives and takes, and when (paper 4.2).

A member takes units for a piece only when it has room, then pulls it; the source frees the piece
on ``KvMoved``. Pieces are taken in the common order of ``policy.moves``, and never beyond what
was promised to the leader (``exchange_budget``).
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kunserve.control.instance.changes.exchange_budget import ExchangeBudget
from kunserve.control.instance.changes.kv_transfer import KvExport, KvImport
from kunserve.control.instance.state import InstanceState
from kunserve.core.ids import InstanceId, PrefixId, RequestId, TransitionId
from kunserve.core.layout import LayerRange
from kunserve.core.messages import ExchangeProgress, KvMoved, PrefixPart
from kunserve.core.transfer import KvPull
from kunserve.policy.exchange.moves import Move, MovePlan
from kunserve.policy.exchange.order import ExchangeShare, plan_exchange

MAX_PIECES_IN_FLIGHT = 128
"""Pieces asked of the mover at once. Room is what bounds them; the mover bounds the wire."""
PATIENCE_S = 0.5
"""How long a piece may wait for units that are free but scattered between blocks in transfer."""
PATIENCE_STEPS = 4
"""Steps that it may wait beside: who takes those blocks says between two steps that it has them."""


class _Step(NamedTuple):
    """A piece that this instance takes or gives, in the common order."""

    request_id: RequestId
    first: int
    end: int
    given_units: int
    taken_units: int


@dataclass(slots=True)
class _Giving:
    """A request that others pull from here."""

    kv: KvExport
    keep: LayerRange
    num_given_layers: int
    num_takers: int
    is_leaving: bool
    """The request's new group has no member here."""
    unmoved_blocks: int
    acks: dict[int, int] = field(default_factory=dict)
    """Takers that have a piece, by the piece's first block."""


@dataclass(slots=True)
class _Taking:
    """A request that is pulled to here."""

    kv: KvImport
    num_layers: int
    """Layers pulled."""
    unplaced_blocks: int
    missing_blocks: int


class Exchange:
    """Gives and takes of one instance."""

    def __init__(self, state: InstanceState, transition_id: TransitionId, float_units: int) -> None:
        self._state = state
        self._transition_id = transition_id
        self._budget = ExchangeBudget(float_units)
        self._num_in_flight = 0
        """Pieces under way to here."""
        self._to_share: dict[RequestId, tuple[PrefixPart, ...]] = {}
        """Of requests whose KV comes, the prefixes that they begin with."""
        self._placed: set[RequestId] = set()
        """Of what comes, all that has its units."""
        self._giving: dict[RequestId, _Giving] = {}
        self._taking: dict[RequestId, _Taking] = {}
        self._steps: deque[_Step] = deque()
        self._open: set[InstanceId] = set()
        """Sources that have switched too, so that their KV may be pulled."""
        self._blocked_s: float | None = None
        self._arrived: list[RequestId] = []
        self._lost: list[RequestId] = []
        self._moved_bytes = 0
        self._acks: list[tuple[InstanceId, KvMoved]] = []

    def begin(self, plan: MovePlan) -> None:
        """Work out this instance's share. Pulling starts with ``advance``."""
        me, moves, pieces = self._state.me, plan.moves, plan.pieces
        shares: dict[RequestId, ExchangeShare] = {}
        for move in moves:
            share = shares[move.request_id] = plan_exchange(move.old, move.new, me)
            assert not (share.sends and share.receives), move
            if share.receives and not share.keep.num_layers:
                self._to_share[move.request_id] = plan.shared.get(move.request_id, ())
            if share.sends and move.num_own:
                self._give(move, share)
            if share.receives and move.num_own:
                self._take(move, share)
        for move, first, end in pieces:
            share = shares[move.request_id]
            given = sum(layers.num_layers for _, layers in share.sends) * (end - first)
            taken = sum(layers.num_layers for _, layers in share.receives) * (end - first)
            if given or taken:
                self._steps.append(_Step(move.request_id, first, end, given, taken))
        self._budget.open(_decline_of(self._steps), self._state.table.free_units)

    def _give(self, move: Move, share: ExchangeShare) -> None:
        kv = KvExport(self._state, move.request_id)
        kv.offer(move.num_blocks, move.first_block)
        num_layers = sum(layers.num_layers for _, layers in share.sends)
        self._giving[move.request_id] = _Giving(
            kv=kv,
            keep=share.keep,
            num_given_layers=num_layers,
            num_takers=len(share.sends),
            is_leaving=move.new.layers_of(self._state.me) is None,
            unmoved_blocks=move.num_own,
        )
        self._budget.add_given(move.num_own * num_layers)

    def _take(self, move: Move, share: ExchangeShare) -> None:
        num_layers = sum(layers.num_layers for _, layers in share.receives)
        self._taking[move.request_id] = _Taking(
            kv=KvImport(
                self._state,
                self._transition_id,
                move.request_id,
                share.receives,
                has_part=share.keep.num_layers > 0,
                first_block=move.first_block,
            ),
            num_layers=num_layers,
            unplaced_blocks=move.num_own,
            missing_blocks=move.num_own,
        )
        self._budget.add_taken(move.num_own * num_layers)

    def open(self, source: InstanceId) -> None:
        """The instance stands in its new group: what it gives may be pulled."""
        self._open.add(source)

    # Taking

    def advance(self, now_s: float, is_running: bool = False) -> None:
        """Start the next pulls that memory and the limit in flight admit.

        While a step runs nothing is moved that it might use: only requests that stall anyway.
        """
        while self._steps:
            step = self._steps[0]
            if step.taken_units == 0:
                self._pass_step()
                continue
            taking = self._taking[step.request_id]
            if self._num_in_flight >= MAX_PIECES_IN_FLIGHT:
                break
            if not self._budget.has_room(step.taken_units):
                break
            if any(src not in self._open for src, _ in taking.kv.sources):
                break
            if not taking.kv.place(step.first, step.end, may_compact=not is_running):
                if not is_running:
                    self._wait_for_units(step.request_id, now_s)
                break
            self._blocked_s = None
            taking.unplaced_blocks -= step.end - step.first
            if not taking.unplaced_blocks:
                self._share(step.request_id)
            self._budget.place(step.taken_units)
            self._pass_step()
            taking.kv.pull(step.first, step.end)
            self._num_in_flight += 1
        self._budget.lower_promise()

    def _share(self, holder: RequestId) -> None:
        """All of a holder has its units: if it is a prefix, those who wait for it may share it."""
        self._placed.add(holder)
        table = self._state.table
        for request_id, parts in self._to_share.items():
            while parts and parts[0].prefix_id in self._placed:
                table.share(request_id, *parts[0])
                parts = parts[1:]
            self._to_share[request_id] = parts

    def _pass_step(self) -> None:
        step = self._steps.popleft()
        self._budget.pass_step(step.given_units, step.taken_units)

    def _wait_for_units(self, request_id: RequestId, now_s: float) -> None:
        """Enough units are free, but no run of them: give the request up if it stays so."""
        if self._num_in_flight:
            return
        if self._blocked_s is None:
            self._blocked_s = now_s
        elif now_s - self._blocked_s >= PATIENCE_S + PATIENCE_STEPS * self._state.step_s:
            self._lose(request_id)

    def pulled(self, piece: KvPull, ok: bool) -> None:
        """A piece landed, or its source could not give it."""
        taking = self._taking.get(piece.request_id)
        if taking is None or not taking.kv.awaits(piece):
            return
        if not ok:
            self._lose(piece.request_id)
            return
        num_blocks = piece.end_block - piece.first_block
        self._blocked_s = None
        unit_bytes = self._state.spec.unit_bytes
        self._moved_bytes += num_blocks * piece.layers.num_layers * unit_bytes
        message = KvMoved(self._transition_id, piece.request_id, piece.first_block, piece.end_block)
        self._acks.append((piece.src, message))
        if not taking.kv.accept(piece):
            return
        self._num_in_flight -= 1
        taking.missing_blocks -= num_blocks
        if taking.missing_blocks == 0:
            del self._taking[piece.request_id]
            self._arrived.append(piece.request_id)

    # Giving

    def moved(self, message: KvMoved) -> None:
        """A taker has a piece; once every taker has it, its given layers are free."""
        giving = self._giving.get(message.request_id)
        if giving is None:
            return
        first, end = message.first_block, message.end_block
        giving.acks[first] = giving.acks.get(first, 0) + 1
        if giving.acks[first] < giving.num_takers:
            return
        table = self._state.table
        table.unpin(message.request_id, first, end)
        table.release_layers(message.request_id, first, end, giving.keep)
        self._budget.free((end - first) * giving.num_given_layers)
        giving.unmoved_blocks -= end - first
        if giving.unmoved_blocks == 0:
            self._stop_giving(message.request_id)
        self._blocked_s = None

    def _stop_giving(self, request_id: RequestId) -> None:
        giving = self._giving.pop(request_id)
        self._budget.free(giving.unmoved_blocks * giving.num_given_layers)
        giving.kv.close()
        if giving.is_leaving:
            self._state.table.release(request_id)

    # Ends in the middle

    def release(self, request_id: RequestId) -> None:
        """Free a request's blocks here, whatever is being done with them."""
        self._to_share.pop(request_id, None)
        self._placed.discard(request_id)
        if request_id in self._giving:
            self._stop_giving(request_id)
        taking = self._taking.pop(request_id, None)
        if taking is not None:
            self._num_in_flight -= taking.kv.num_in_flight
            taking.kv.cancel()
            self._budget.cancel(taking.unplaced_blocks * taking.num_layers)
        self._state.table.release(request_id)
        self._blocked_s = None
        kept = [step for step in self._steps if step.request_id != request_id]
        if len(kept) < len(self._steps):
            self._steps = deque(kept)
            self._budget.forget_steps(_decline_of(kept))

    def _lose(self, request_id: RequestId) -> None:
        """The KV cannot be had: the leader will have the request recomputed.

        If it is a prefix, all who share it.
        """
        sharing = {*self._state.table.loans.borrowers(request_id)}
        for waiting, parts in self._to_share.items():
            if any(part.prefix_id == request_id for part in parts):
                sharing.add(waiting)
        for borrower in sorted(sharing):
            self._lose(borrower)
        self._lost.append(request_id)
        self.release(request_id)

    def dropped(self, request_id: RequestId) -> None:
        """The request ended in a group without this instance: nobody will pull it any more."""
        giving = self._giving.get(request_id)
        if giving is not None and giving.is_leaving:
            self.release(request_id)

    def evict(self, prefix_id: PrefixId, end_block: int) -> None:
        """The cache gives blocks of a prefix up: all, if another member could not get it."""
        if prefix_id in self._giving or prefix_id in self._taking:
            self.release(prefix_id)
        else:
            self._state.table.evict(prefix_id, end_block)

    # Accounts

    @property
    def is_finished(self) -> bool:
        """Nothing left to give or to take."""
        return not self._giving and not self._taking

    def drain_acks(self) -> list[tuple[InstanceId, KvMoved]]:
        """Messages to the sources of what has landed."""
        acks, self._acks = self._acks, []
        return acks

    def progress(self) -> ExchangeProgress:
        """The account for the leader; what happened since the last call is in it."""
        self._budget.lower_promise()
        message = ExchangeProgress(
            transition_id=self._transition_id,
            instance_id=self._state.me,
            extra_units=0 if self.is_finished else self._budget.promised_units,
            arrived=tuple(self._arrived),
            moved_bytes=self._moved_bytes,
            is_finished=self.is_finished,
            lost=tuple(self._lost),
        )
        self._arrived, self._lost = [], []
        self._moved_bytes = 0
        return message

    def check(self) -> None:
        """Assert that the accounts agree with the gives and takes."""
        held = sum(g.unmoved_blocks * g.num_given_layers for g in self._giving.values())
        owed = sum(t.unplaced_blocks * t.num_layers for t in self._taking.values())
        self._budget.check(held, owed, _decline_of(self._steps))
        in_flight = sum(taking.kv.num_in_flight for taking in self._taking.values())
        assert in_flight == self._num_in_flight, (in_flight, self._num_in_flight)


def _decline_of(steps: Iterable[_Step]) -> int:
    """How much less the exchange uses after these steps."""
    return sum(step.given_units - step.taken_units for step in steps)
