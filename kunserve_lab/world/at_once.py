"""What a body does of a device's steps that has none: a step is over when it was asked for."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from kunserve.control.instance.body import StepOutcome, StepWork


class ComputesAtOnce(ABC):
    """The part of ``WiredBody`` that is about steps on their way."""

    @abstractmethod
    def execute(
        self, work: StepWork, hidden: Any, look_up: Callable[[], None] | None = None
    ) -> StepOutcome:
        """Run the step."""

    def launch(self, work: StepWork, *given: Any) -> StepOutcome:
        """Compute at once what ``collect`` gives."""
        return self.execute(work, *given)

    def await_input(self, asked: StepOutcome, look_up: Callable[[], None] | None = None) -> None:
        """It was there."""
        assert asked is not None

    def pass_on(self, asked: StepOutcome, to: str) -> memoryview | None:
        """Nobody here waits for hidden states."""
        return None

    def collect(self, asked: StepOutcome, look_up: Callable[[], None] | None = None) -> StepOutcome:
        """What was launched."""
        return asked
