"""How much KV memory an exchange may use on one instance, and what it promises its leader.

The exchange uses ``held - owed`` units beside the group's own blocks: ``held`` belong to blocks
that others have yet to pull from here, ``owed`` to blocks that the group counts already and that
have yet to be pulled to here. A *promise* is an upper bound of that use. It rests on three rules:

* A piece is taken only if the use stays within the promise, and freeing a piece lowers the use.
  So the promise is kept.
* The promise only falls. So an old one is never too small: the leader may give all other memory
  to new requests, however late it learns of a piece.
* It never falls below ``max(use, decline) + float`` while anything is owed. ``decline`` is the
  use once all pieces have landed whose turn has passed. All pairs of groups advance in proportion
  (``policy.moves``), so memory use moves linearly from old to new, within the float. So the piece
  that is first in the common order always fits: the exchange cannot get stuck.

A *loan* lets taking run further ahead of giving, because a peer acknowledges a piece between two
layers or steps, while its bytes take milliseconds. It is a part of the memory that nobody uses
yet, and ends with the last piece.
"""

LOAN_SHARE = 0.5
"""Share of the unused KV memory that is lent. The leader has the rest for new requests at once."""


class ExchangeBudget:
    """Units held, owed, promised and lent. The exchange tells it of every change."""

    def __init__(self, float_units: int) -> None:
        """``float_units``: room beside before and after (``policy.moves.float_units``)."""
        self._float_units = float_units
        self._held_units = 0
        self._owed_units = 0
        self._decline_units = 0
        self._loan_units = 0
        self._promised_units = 0

    @property
    def promised_units(self) -> int:
        """Units that the exchange may use at most from now on beside the group's own blocks."""
        return self._promised_units

    @property
    def _used_units(self) -> int:
        return self._held_units - self._owed_units

    # At the beginning

    def add_given(self, units: int) -> None:
        """Blocks of so many units are to be pulled from here."""
        self._held_units += units

    def add_taken(self, units: int) -> None:
        """Blocks of so many units are to be pulled to here."""
        self._owed_units += units

    def open(self, decline_units: int, free_units: int) -> None:
        """All gives and takes are known: make the first promise."""
        self._decline_units = decline_units
        room = max(0, self._used_units, decline_units) + self._float_units
        unused = free_units + self._used_units - room
        self._loan_units = max(0, int(LOAN_SHARE * unused))
        self._promised_units = self._wanted_units()

    # Meanwhile

    def has_room(self, units: int) -> bool:
        """Whether a piece of so many units may be taken."""
        return self._used_units + units <= self._promised_units

    def place(self, units: int) -> None:
        """A piece has got its units."""
        self._owed_units -= units

    def free(self, units: int) -> None:
        """A piece was pulled from here, or nobody wants it any more."""
        self._held_units -= units

    def pass_step(self, given_units: int, taken_units: int) -> None:
        """A piece's turn has passed."""
        self._decline_units -= given_units - taken_units

    def forget_steps(self, decline_units: int) -> None:
        """A request's pieces are struck from the order."""
        self._decline_units = decline_units

    def cancel(self, units: int) -> None:
        """Blocks that have no units yet are wanted no more.

        The leader sets the blocks of a request that ends here aside until the exchange is over,
        so the promise may rise by them.
        """
        self._owed_units -= units
        self._promised_units += units

    def lower_promise(self) -> None:
        """Promise what the rest of the exchange may need, if that is less."""
        self._promised_units = min(self._promised_units, self._wanted_units())

    def _wanted_units(self) -> int:
        wanted = max(0, self._used_units)
        if self._owed_units:
            ahead = min(self._loan_units, self._owed_units)
            wanted = max(wanted, self._decline_units) + self._float_units + ahead
        return wanted

    def check(self, held_units: int, owed_units: int, decline_units: int) -> None:
        """Assert that the counters are these sums, and that the promise is kept."""
        assert held_units == self._held_units, (held_units, self._held_units)
        assert owed_units == self._owed_units, (owed_units, self._owed_units)
        assert decline_units == self._decline_units, (decline_units, self._decline_units)
        assert self._used_units <= self._promised_units, (self._used_units, self._promised_units)
