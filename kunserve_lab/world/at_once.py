"""What a body does of a device's steps that has none: a step is over when it was asked for."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from kunserve.control.instance.body import StepOutcome, StepWork
from kunserve.core.ids import GroupId


class NoTokensAhead:
    """See ``TokensAhead``."""

    def feeds_from(self, group_id: GroupId) -> bool:
        """Never."""
        return False

    def stop_waiting(self) -> None:
        """Nobody does."""


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

    ahead: Any = NoTokensAhead()

    def await_input(self, asked: StepOutcome, look_up: Callable[[], None] | None = None) -> bool:
        """It was there."""
        return asked is not None

    def reads_ahead(self, hidden: Any) -> bool:
        """As a device does."""
        return True

    def write_ahead(self, asked: StepOutcome, to: str) -> memoryview | None:
        """Nobody here waits for hidden states."""
        return None

    def write_tokens(self, asked: StepOutcome, to: str) -> memoryview | None:
        """Or for tokens."""
        return None

    def collect(self, asked: StepOutcome, look_up: Callable[[], None] | None = None) -> StepOutcome:
        """What was launched."""
        return asked
