"""Where a group stands, and what it may do there: one table that all ask who choose groups.

A group serves unless something else is true of it. Of several things at once each has a say: the
group may do what all of them allow.
"""

import enum
from collections.abc import Set
from functools import cache


class Standing(enum.Enum):
    """What is true of a group that does not only serve."""

    FORMING = "forming"  # its members load weights
    CLOSING = "closing"  # a commit under way makes other groups of it
    CHANGING = "changing"  # it has a part in a transition, the exchange included
    TESTING = "testing"  # it is kept for suspects, who run among themselves
    MIGRATING = "migrating"  # a running request is on its way from it, or to it
    LEAVING = "leaving"  # its instance is given back once it is empty
    DEPARTING = "departing"  # its instance ends once it is empty, and is started anew


class Act(enum.Enum):
    """What somebody would have a group do."""

    TAKE = "take"  # be sent requests
    RETURN = "return"  # give waiting requests back
    CHANGE = "change"  # begin a drop or a restore
    LEND = "lend"  # give layers to others, and have a say in whether memory is short
    MOVE = "move"  # give or take a running request for balance
    GIVE = "give"  # give running requests away, one after the other, to be empty
    LEAVE = "leave"  # begin to leave
    TEST = "test"  # be kept for suspects
    END = "end"  # lose its instance


_SERVING = frozenset(Act) - {Act.GIVE, Act.END}
_MAY = {
    Standing.FORMING: frozenset[Act](),
    Standing.CLOSING: frozenset[Act](),
    Standing.CHANGING: frozenset({Act.TAKE, Act.RETURN}),
    Standing.TESTING: frozenset({Act.TEST}),
    Standing.MIGRATING: frozenset({Act.TAKE, Act.RETURN, Act.LEND, Act.LEAVE}),
    Standing.LEAVING: frozenset({Act.RETURN, Act.LEND, Act.GIVE, Act.END}),
    Standing.DEPARTING: frozenset({Act.RETURN, Act.LEND, Act.GIVE, Act.LEAVE, Act.END}),
}


@cache
def allowed(standing: frozenset[Standing]) -> Set[Act]:
    """What a group of which all of these are true may do."""
    return frozenset.intersection(*(_MAY[one] for one in standing)) if standing else _SERVING
