"""What changes on an instance beside steps: one thing at a time.

A restoration's transition takes the place of the change that has loaded its layers; everything
else waits, or is refused.
"""

from kunserve.control.instance.changes.change import Change, ChangeOrder
from kunserve.control.instance.changes.layer_restore import LayerRestore
from kunserve.control.instance.changes.migration_source import MigrationSource
from kunserve.control.instance.changes.migration_target import MigrationTarget
from kunserve.control.instance.changes.transition import Enter, TransitionMember
from kunserve.control.instance.membership import Membership
from kunserve.control.instance.state import InstanceState
from kunserve.core.ids import TransitionId
from kunserve.core.messages import LoadLayers, Migrate, OfferKv, Prepare


class ChangeSlot:
    """Owner of the rule that one change is under way at a time."""

    def __init__(self, state: InstanceState, enter: Enter) -> None:
        """``enter`` has the instance stand in a new group."""
        self._state = state
        self._enter = enter
        self._none = self._change = Change(state)

    @property
    def change(self) -> Change:
        """What is under way, if anything; what is over is not."""
        return self._none if self._change.is_over else self._change

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been under way since the last ``advance``."""
        return self._change is self._none

    def clear(self) -> None:
        """Whatever was under way is void: the instance starts anew."""
        self._change = self._none

    def begin(self, order: ChangeOrder, membership: Membership, now_s: float) -> None:
        """Begin what is asked for, or answer why not."""
        state, change = self._state, self.change
        state.body.end_copies()
        obstacle = None if change.precedes(order) else change.occupation
        begun: Change | None
        match order:
            case Prepare():
                begun = TransitionMember.begin(
                    state, membership, self._enter, order, change, obstacle, now_s
                )
            case LoadLayers():
                begun = LayerRestore.begin(state, membership, order, obstacle, now_s)
            case Migrate():
                begun = MigrationSource.begin(state, membership, order, obstacle)
            case OfferKv(migration_id) if migration_id == change.change_id:
                begun = None
                change.on(order, now_s)
            case OfferKv():
                begun = MigrationTarget.begin(state, membership, order, obstacle)
        if begun is not None:
            self._change = begun

    def roll_back(self, transition_id: TransitionId) -> None:
        """Forget what was prepared, and give back what was loaded for it."""
        if self.change.change_id == transition_id:
            self._change = self.change.roll_back()

    def prepare(self) -> None:
        """Have memory do a piece of what the change prepares."""
        self._change = self.change.prepare()

    def advance(self, now_s: float) -> None:
        """Let the change take whatever step has become possible, and forget it if it is over."""
        self.change.advance(now_s)
        self._change = self.change
