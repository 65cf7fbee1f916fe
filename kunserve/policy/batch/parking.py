"""Who of the requests that decode makes way for one that waits, and for how long (parking).

Where KV memory keeps the head of a queue from its first token, decodes move to host memory. Their
clients have tokens to read; whoever waits has none. It costs pauses in the middle of answers, so
four rules bound it:

    gain      nobody is parked unless memory is then enough for a first token
    pause     nobody is away longer than ``max_park_s``: who is due comes back before anybody is
              admitted, and others are parked in its place
    turns     nobody is parked for the head within ``max_park_s / 2`` of its first token, or of its
              return; and nobody again while others, who may be parked, were parked less often
    priority  nobody is parked for the head who is more urgent, nor before who is less urgent

When somebody is due and too few have run that long, the pause counts more than the turn.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

RUN_SHARE = 0.5
"""Of the longest pause: how long a request runs before it is parked for the head of the queue."""
MAX_AWAY_SHARE = 1.0
"""Of the group's memory: more is not parked for the head, so that all get back in time."""
RETURN_STEPS = 6
"""A return is begun so many steps before its time, beside the copies: a step ends, in one another
request leaves, in one this one comes back, and one makes its next token."""
MAX_LEAD_SHARE = 0.5
"""Of the longest pause: a return is begun no sooner, because a short pause gains nobody much."""


class Decoding(NamedTuple):
    """A request that makes tokens."""

    num_blocks: int
    """That parking it frees."""
    num_streamed: int
    """Tokens that its client has."""
    num_parked: int
    """Times that it was parked."""
    ran_s: float
    """Since its first token, or since it came back."""
    priority: int = 0
    """The lower, the later it goes."""


class Away(NamedTuple):
    """A parked request that is not on its way back."""

    pause_s: float
    """So far."""
    copy_s: float
    """Of its KV, one way."""


def choose_parked(
    decodes: Sequence[Decoding],
    missing_blocks: int,
    room_blocks: int,
    max_park_s: float,
    priority: float = -math.inf,
) -> list[int]:
    """Whom to park so that the head of the queue gets ``missing_blocks``; empty if nobody.

    Of the least urgent who was parked least often goes first, and of these who has streamed most.
    Nobody goes who is not needed, or more urgent than ``priority``, which is the head's.
    ``room_blocks`` may be parked at most (`room_for`).
    """
    rested = [
        i
        for i, one in enumerate(decodes)
        if one.ran_s >= RUN_SHARE * max_park_s and one.priority >= priority
    ]
    chosen = _fewest(decodes, sorted(rested, key=lambda i: _turn(decodes[i])), missing_blocks)
    return chosen if sum(decodes[i].num_blocks for i in chosen) <= room_blocks else []


def choose_in_place(
    decodes: Sequence[Decoding], missing_blocks: int, max_park_s: float
) -> list[int]:
    """Whom to park in the place of one who is due; empty if all together would not be enough.

    As `choose_parked`, but if those who ran long enough do not suffice then others go too: who
    has run longest first. More urgent ones go where the others together would not be enough,
    because the bound holds for everybody's pause.
    """
    room = sum(one.num_blocks for one in decodes)
    longest_first = sorted(range(len(decodes)), key=lambda i: -decodes[i].ran_s)
    for priority in sorted({one.priority for one in decodes}, reverse=True):
        chosen = choose_parked(decodes, missing_blocks, room, max_park_s, priority)
        if not chosen:
            order = [i for i in longest_first if decodes[i].priority >= priority]
            chosen = _fewest(decodes, order, missing_blocks)
        if chosen:
            return chosen
    return []


def num_due(away: Iterable[Away], step_s: float, max_park_s: float) -> int:
    """How many of these, longest away first, must come back now to keep the bound.

    Each needs as much copied out in its place, and the copies of all go one after the other.
    ``step_s`` is the time of a full step.
    """
    due = ahead = 0
    lead_s = RETURN_STEPS * step_s
    for ahead, one in enumerate(away, start=1):
        lead_s += 2.0 * one.copy_s
        if one.pause_s + min(lead_s, MAX_LEAD_SHARE * max_park_s) >= max_park_s:
            due = ahead
    return due


def room_for(
    capacity_blocks: int,
    away_blocks: int,
    host_blocks: int | None,
    blocks_per_s: float,
    max_park_s: float,
) -> int:
    """Blocks that may still be parked for the head. ``host_blocks``: None is no limit.

    A slow link parks little: what is away must be back, and as much be away, in good time.
    """
    room = min(MAX_AWAY_SHARE * capacity_blocks, MAX_LEAD_SHARE * max_park_s * blocks_per_s / 2.0)
    if host_blocks is not None:
        room = min(room, host_blocks)
    return max(0, int(room) - away_blocks)


def _turn(one: Decoding) -> tuple[int, int, int]:
    return -one.priority, one.num_parked, -one.num_streamed


def _fewest(decodes: Sequence[Decoding], order: Sequence[int], missing_blocks: int) -> list[int]:
    """The first of the order that free enough, without those who are not needed."""
    chosen: list[int] = []
    freed = 0
    for index in order:
        if freed >= missing_blocks:
            break
        chosen.append(index)
        freed += decodes[index].num_blocks
    if freed < missing_blocks:
        return []
    for index in tuple(reversed(chosen)):
        blocks = decodes[index].num_blocks
        if freed - blocks >= missing_blocks:
            chosen.remove(index)
            freed -= blocks
    return chosen
