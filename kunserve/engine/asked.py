"""A step that a device was asked for, and that nobody has waited for."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from kunserve.control.instance.body import StepWork
from kunserve.core.step import SampledToken
from kunserve.engine.backend import Wait
from kunserve.engine.cpu.decoder import StepBatch
from kunserve.engine.cpu.hidden_rows import Hidden, HiddenRows


class Asked(NamedTuple):
    """What ``EngineBody.launch`` gives, and ``collect`` ends."""

    work: StepWork
    batch: StepBatch
    hidden: Hidden | None
    """What it reads of the stage before."""
    states: torch.Tensor | None
    """[T, hidden] behind the stage's layers; None where only tokens are asked for."""
    take: Callable[[], tuple[SampledToken, ...]]
    """Gives its tokens."""
    wait: Wait

    def await_input(self, look_up: Callable[[], None] | None = None) -> bool:
        """Return when it is there; False if it never will be, and the step is void."""
        return not isinstance(self.hidden, HiddenRows) or self.hidden.await_all(look_up)

    @property
    def states_to_come(self) -> torch.Tensor | None:
        """For the next stage, which may wait for them. None of a step that is void: whoever waits
        could not see that. So this waits for the input.
        """
        return None if self.work.is_last or not self.await_input() else self.states
