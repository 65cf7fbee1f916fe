"""On a network: no word on a transition before all its members are connected.

A transition that is committed between hosts that do not reach each other would fail, and all its
requests would run again. One that is not prepared has changed nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kunserve.core.ids import InstanceId, TransitionId
from kunserve.core.messages import Form, Message, Prepare, Prepared, Rollback


@dataclass(slots=True)
class _Held:
    message: Prepare
    since_s: float


class PrepareGate:
    """Holds ``Prepare`` back for a while. Belongs to the loop's thread."""

    def __init__(
        self,
        me: InstanceId,
        unreached: Callable[[Iterable[InstanceId]], list[InstanceId]],
        patience_s: float,
    ) -> None:
        """``unreached``: those of the instances to whom no connection stands."""
        self._me = me
        self._unreached = unreached
        self._patience_s = patience_s
        self._held: dict[TransitionId, _Held] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether connections are waited for, a matter of milliseconds."""
        return bool(self._held)

    def passes(self, message: Message, now_s: float) -> bool:
        """Whether the agent shall have the message now; else it is kept, or has become void."""
        match message:
            case Prepare() if self._missing(message):
                self._held[message.transition_id] = _Held(message, now_s)
                return False
            case Rollback(transition_id):
                return self._held.pop(transition_id, None) is None
            case Form():
                self._held.clear()
        return True

    def turn(self, now_s: float) -> tuple[list[Prepare], list[Prepared]]:
        """What the agent shall have now, and what the front is answered without it."""
        passed, refused = [], []
        for transition_id, held in tuple(self._held.items()):
            missing = self._missing(held.message)
            if not missing:
                passed.append(held.message)
            elif now_s - held.since_s > self._patience_s:
                reason = f"no connection to instances {missing}"
                refused.append(Prepared(transition_id, self._me, reason, tuple(missing)))
            else:
                continue
            del self._held[transition_id]
        return passed, refused

    def _missing(self, message: Prepare) -> list[InstanceId]:
        layouts = message.old + message.new
        return self._unreached(sorted({i for layout in layouts for i in layout.members}))
