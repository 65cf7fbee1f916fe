"""What an instance's loop asks of a body, beside what its brain does."""

from collections.abc import Callable
from typing import Any, Protocol

from kunserve.control.instance.body import Body, Memory, RunsAhead, StepOutcome, StepWork
from kunserve.core.ids import GroupId, StepId
from kunserve.core.layout import LayerRange
from kunserve.transport.bulk.movable_memory import MovableMemory, WriteGate


class WiredMemory(Memory, MovableMemory, Protocol):
    """What the brain changes, and movers read and fill."""


class TokensAhead(Protocol):
    """Tokens of other stages for a device, before hosts have heard of them."""

    def tokens_come(self, data: memoryview, group_id: GroupId, step_id: StepId) -> None:
        """What came beside the tokens of a step: so later ones will be there."""
        ...

    def feeds_from(self, group_id: GroupId) -> bool:
        """Whether the device may wait for those of the group."""
        ...

    def stop_waiting(self) -> None:
        """Make steps void that wait for some in vain."""
        ...


class WiredBody(Body, RunsAhead, Protocol):
    """A body whose activations can cross a wire, and whose host can read mail during a step."""

    @property
    def memory(self) -> WiredMemory:
        """See ``Body``."""
        ...

    @property
    def computes_aside(self) -> bool:
        """Whether the host is free while a step is computed."""
        ...

    @property
    def maps_when_idle(self) -> bool:
        """Whether memory is mapped between steps only, and not beside them."""
        ...

    def execute(
        self,
        work: StepWork,
        hidden: Any,
        look_up: Callable[[], None] | None = None,
    ) -> StepOutcome:
        """As ``Body.execute``; calls ``look_up``, if given, between layers."""
        ...

    def launch(self, work: StepWork, hidden: Any, look_up: Callable[[], None] | None = None) -> Any:
        """Ask a device for what ``execute`` does: ``collect`` is given the answer, and gives it.

        One that ``is_ahead`` may be launched before the one before it is collected.
        """
        ...

    def collect(self, asked: Any, look_up: Callable[[], None] | None = None) -> StepOutcome:
        """The outcome of a launch, in the order of launches. Waits for it, and looks up then."""
        ...

    def await_input(self, asked: Any, look_up: Callable[[], None] | None = None) -> bool:
        """Return when others have written what a launched step reads; False if they never will."""
        ...

    def write_ahead(self, asked: Any, to: str) -> memoryview | None:
        """For the wire, if the peer's device can wait for hidden states that are not there yet.

        None: they cross it once ``collect`` has given them. Called right behind ``launch``.
        """
        ...

    def write_tokens(self, asked: Any, to: str) -> memoryview | None:
        """For the wire, beside what the step samples, if the leader's device can wait for that.

        Called right behind ``launch``.
        """
        ...

    @property
    def ahead(self) -> TokensAhead:
        """What the leader's device waits for."""
        ...

    def hidden_to_bytes(self, hidden: Any, to: str = "") -> memoryview:
        """Hidden states, or a part of the output head, without a copy where possible.

        To the peer whose links have the address ``to``.
        """
        ...

    def hidden_from_bytes(self, data: memoryview) -> Any:
        """The inverse, on the receiving stage."""
        ...

    def load_layers(self, layers: LayerRange, gate: WriteGate) -> None:
        """Fill mapped layers from disk; whatever writes there passes the ``gate``."""
        ...
