"""Where requests go when groups change, and in which order their KV moves (section 4.2).

An exchange is memory-neutral: every piece given makes room for one taken. It cannot get stuck if
at every moment the instance that holds up the others has room for its next piece. So pieces have
one common order in which all pairs of (old group, new group) advance in proportion: an instance's
use of memory then goes from what it was to what it will be in a straight line, but for a few
pieces, and ``float_units`` free units beside the larger of the two suffice. Whatever would not
leave that room is recomputed instead.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kunserve.core.ids import GroupId, InstanceId, PrefixId, RequestId
from kunserve.core.kv_blocks import KvBlocks
from kunserve.core.layout import GroupLayout
from kunserve.core.messages import PrefixPart, PrefixState, SequenceKv
from kunserve.core.snapshots import InstanceSpec
from kunserve.policy.drop.assignment import SequenceToPlace, assign_sequences
from kunserve.policy.drop.capacity import Specs, group_capacity_blocks
from kunserve.policy.exchange.moved_prefixes import (
    Kept,
    MovedPrefix,
    Use,
    fair_shares,
    has_room,
    prefix_ids,
)
from kunserve.policy.exchange.order import cut_pieces, order_moves

MAX_PIECE_BLOCKS = 16
"""Blocks that one pull moves at most."""
PIECES_PER_POOL = 32
"""A piece is at most this part of the smallest pool, so that the float stays small."""


class Move(NamedTuple):
    """One holder of KV, a request or a prefix, that lies by ``old`` and shall lie by ``new``."""

    request_id: RequestId
    num_blocks: int
    """Of a request, with those that it shares."""
    old: GroupLayout
    new: GroupLayout
    first_block: int = 0
    """Blocks [first_block, num_blocks) are the holder's own and move; they may be none."""

    @property
    def num_own(self) -> int:
        """Blocks that move."""
        return self.num_blocks - self.first_block


class Piece(NamedTuple):
    """Blocks [first_block, end_block) of a move: what one pull takes."""

    move: Move
    first_block: int
    end_block: int


@dataclass(frozen=True, slots=True)
class MovePlan:
    """Computed alike by every instance of a transition from the same handovers."""

    homes: dict[RequestId, GroupId]
    """The new group of every sequence, waiting ones included."""
    moves: tuple[Move, ...]
    """Sequences that keep their KV, each behind the prefixes that it shares. Others with KV are
    recomputed."""
    pieces: tuple[Piece, ...]
    """All pieces of all moves in the common order."""
    shared: dict[RequestId, tuple[PrefixPart, ...]] = field(default_factory=dict)
    """What moving sequences share, by the ids that prefixes have in their new groups."""
    prefixes: tuple[MovedPrefix, ...] = ()
    """One for each prefix and each new group where it is wanted."""


def choose_piece_blocks(specs: Iterable[InstanceSpec]) -> int:
    """Blocks per pull, small beside the smallest pool, and the same on every instance."""
    smallest = min(spec.kv_units // spec.num_layers for spec in specs)
    return max(1, min(MAX_PIECE_BLOCKS, smallest // PIECES_PER_POOL))


def float_units(
    me: InstanceId, old: Sequence[GroupLayout], new: Sequence[GroupLayout], piece_blocks: int
) -> int:
    """KV units that ``me`` needs free beside its blocks during the exchange.

    One piece of every pair of groups, since each may be a piece ahead or behind; the next piece;
    and room to lay one block out anew where layers join those already here.
    """
    ahead = largest = relayout = 0
    for before in old:
        for after in new:
            given, kept, taken = _count_layers(before, after, me)
            ahead += max(given, taken)
            largest = max(largest, taken)
            if taken and kept:
                relayout = taken + kept
    return piece_blocks * (ahead + largest) + relayout


def _count_layers(before: GroupLayout, after: GroupLayout, me: InstanceId) -> tuple[int, int, int]:
    """Layers of a request's KV that ``me`` gives, keeps and takes: sizes of ``plan_exchange``.

    Each layer has one place before and one after: what is not kept is given, or taken.
    """
    held, wanted = before.layers_of(me), after.layers_of(me)
    if held is None or wanted is None:
        kept = 0
    else:
        kept = max(0, held.intersect(wanted).num_layers)
    given = 0 if held is None else held.num_layers - kept
    taken = 0 if wanted is None else wanted.num_layers - kept
    return given, kept, taken


def ranks_obstacle(sizes: Iterable[int]) -> str | None:
    """Why instances of so many ranks each cannot be one group, if they cannot."""
    different = sorted(set(sizes))
    if len(different) < 2:
        return None
    return (
        f"instances of {' and '.join(map(str, different))} ranks do not merge, because each cuts "
        "KV and layers its own way"
    )


def weights_obstacle(specs: Iterable[InstanceSpec]) -> str | None:
    """Why no layers are given up, where any of these instances has them with others."""
    shared = any(spec.shared_weights_bytes for spec in specs)
    return "weights are shared" if shared else None


def find_obstacle(
    members: Collection[InstanceId],
    old: Sequence[GroupLayout],
    new: Sequence[GroupLayout],
    specs: Specs,
) -> str | None:
    """Why one of ``members`` could not exchange KV in this change of groups, or None.

    ``specs`` are those of the change's instances and no others.
    """
    obstacle = weights_obstacle(specs.values())
    obstacle = obstacle or ranks_obstacle(spec.tensor_parallel_size for spec in specs.values())
    if obstacle is not None:
        return obstacle
    for before in old:
        for after in new:
            for me in members:
                given, _, taken = _count_layers(before, after, me)
                if given and taken:
                    return f"would give and take KV of the same request ({before}, {after})"
    if len(new) > 1:
        return None
    piece_blocks = choose_piece_blocks(specs.values())
    blocks = [group_capacity_blocks(layout, specs) for layout in old]
    used = sum(blocks)
    for me in members:
        spare = float_units(me, old, new, piece_blocks)
        layers = new[0].layers_of(me)
        assert layers is not None, (me, new)
        units = specs[me].units_when_holding(layers.num_layers)
        if used * layers.num_layers + spare > units:
            return f"{units} KV units are too few for {used} blocks and the exchange"
        for layout, own in zip(old, blocks, strict=True):
            mine = layout.layers_of(me)
            if mine is not None and own * mine.num_layers + spare > units:
                return f"the drop would free too few KV units to exchange in ({spare} are needed)"
    return None


def plan_moves(
    handed_over: Sequence[tuple[GroupLayout, Sequence[SequenceKv]]],
    new: Sequence[GroupLayout],
    specs: Specs,
    prefixes: Iterable[PrefixState] = (),
) -> MovePlan:
    """The new group of every sequence, which keep their KV, and the order of the pieces.

    Those that came last lose their KV first where memory would not suffice. ``prefixes`` are all
    that the sequences share.
    """
    old = [layout for layout, _ in handed_over]
    piece_blocks = choose_piece_blocks(specs.values())
    room = {
        stage.instance_id: specs[stage.instance_id].units_when_holding(stage.layers.num_layers)
        - float_units(stage.instance_id, old, new, piece_blocks)
        for layout in new
        for stage in layout.stages
    }

    def room_of(layout: GroupLayout) -> int:
        return min(room[stage.instance_id] // stage.layers.num_layers for stage in layout.stages)

    capacities = {layout.group_id: max(0, room_of(layout)) for layout in new}
    by_prefix = {prefix.prefix_id: prefix for prefix in prefixes}
    kept: list[Kept] = []
    for layout, states in handed_over:
        most, use = room_of(layout), Use(by_prefix)
        for state in sorted(states, key=_place):
            use.add(state)
            if state.num_blocks and use.num_blocks <= most:
                kept.append(Kept(state, layout))
    kept.sort(key=lambda one: _place(one.state))
    everyone = [state for _, states in handed_over for state in states]
    blocks = next(iter(specs.values())).blocks
    while True:
        homes = _find_homes(everyone, kept, capacities, by_prefix, blocks)
        if homes is not None and has_room(kept, homes, capacities, room_of, by_prefix):
            break
        kept.pop()
    by_id = {layout.group_id: layout for layout in new}
    ids = prefix_ids(kept, homes)
    moves: list[Move] = []
    moved: dict[PrefixId, MovedPrefix] = {}
    shared: dict[RequestId, tuple[PrefixPart, ...]] = {}
    for state, layout in order_moves(kept):
        home = by_id[homes[state.request_id]]
        parts = [PrefixPart(ids[p, home.group_id], end) for p, end in state.shared]
        for (old_id, _), (prefix_id, _) in zip(state.shared, parts, strict=True):
            if prefix_id not in moved:
                prefix = by_prefix[old_id]
                moved[prefix_id] = MovedPrefix(prefix_id, prefix, home.group_id)
                first, end = prefix.first_block, prefix.end_block
                moves.append(Move(prefix_id, end, layout, home, first))
        shared[state.request_id] = tuple(parts)
        first = state.first_own_block
        moves.append(Move(state.request_id, state.num_blocks, layout, home, first))
    pieces = _order_pieces(moves, piece_blocks)
    return MovePlan(homes, tuple(moves), pieces, shared, tuple(moved.values()))


def _find_homes(
    states: list[SequenceKv],
    kept: list[Kept],
    capacities: dict[GroupId, int],
    prefixes: Mapping[PrefixId, PrefixState],
    blocks: KvBlocks,
) -> dict[RequestId, GroupId] | None:
    if len(capacities) == 1:
        (only,) = capacities
        return dict.fromkeys((state.request_id for state in states), only)
    largest = max(capacities.values())
    shares = fair_shares(kept, prefixes)
    return assign_sequences(
        [
            SequenceToPlace(
                state.request_id,
                shares.get(state.request_id, 0),
                min(largest, blocks.holding(state.max_stored_tokens)),
                state.arrival_s,
            )
            for state in states
        ],
        capacities,
    )


def _order_pieces(moves: Sequence[Move], piece_blocks: int) -> tuple[Piece, ...]:
    """Request by request within a pair of groups, and all pairs in proportion."""
    by_pair: dict[tuple[GroupId, GroupId], list[Move]] = {}
    for move in moves:
        by_pair.setdefault((move.old.group_id, move.new.group_id), []).append(move)
    placed: list[tuple[float, int, Piece]] = []
    for number, pair in enumerate(sorted(by_pair)):
        total = sum(move.num_own for move in by_pair[pair])
        done = 0
        for move in by_pair[pair]:
            for start, stop in cut_pieces(move.num_own, piece_blocks):
                done += stop - start
                first = move.first_block
                piece = Piece(move, first + start, first + stop)
                placed.append((done / total, number, piece))
    placed.sort(key=lambda item: item[:2])
    return tuple(piece for _, _, piece in placed)


def _place(state: SequenceKv) -> tuple[int, float, RequestId]:
    return state.priority, state.arrival_s, state.request_id
