"""What an instance's loop asks of a body, beside what its brain does."""

from collections.abc import Callable
from typing import Any, Protocol

from kunserve.control.instance.body import Body, Memory, StepOutcome, StepWork
from kunserve.core.layout import LayerRange
from kunserve.core.request import SamplingParams
from kunserve.transport.bulk.movable_memory import MovableMemory, WriteGate


class WiredMemory(Memory, MovableMemory, Protocol):
    """What the brain changes, and movers read and fill."""


class WiredBody(Body, Protocol):
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

        One step that ``feeds`` on the last one may be launched before that is collected.
        """
        ...

    def collect(self, asked: Any, look_up: Callable[[], None] | None = None) -> StepOutcome:
        """The outcome of a launch, in the order of launches. Waits for it, and looks up then."""
        ...

    def await_input(self, asked: Any, look_up: Callable[[], None] | None = None) -> None:
        """Return when the stage before has written what a launched step reads, or never will."""
        ...

    def pass_on(self, asked: Any, to: str) -> memoryview | None:
        """For the wire, if the peer's device can wait for hidden states that are not there yet.

        None: they cross it once ``collect`` has given them.
        """
        ...

    def feeds_back(self, sampling: SamplingParams) -> bool:
        """Whether a step may now be launched that feeds on such a request's token."""
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
