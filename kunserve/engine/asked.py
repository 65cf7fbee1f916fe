"""A step that a device was asked for, and that nobody has waited for."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from kunserve.control.instance.body import StepWork
from kunserve.core.step import SampledToken
from kunserve.engine.backend import Wait
from kunserve.engine.cpu.decoder import StepBatch
from kunserve.engine.cpu.hidden_rows import Hidden, HiddenRows
from kunserve.engine.ways_ahead import FedTokens


class Asked(NamedTuple):
    """What ``EngineBody.launch`` gives, and ``collect`` ends."""

    work: StepWork
    batch: StepBatch
    hidden: Hidden | None
    """What it reads of the stage before."""
    fed: FedTokens | None
    """What it reads of the last stage."""
    states: torch.Tensor | None
    """[T, hidden] behind the stage's layers; None where only tokens are asked for."""
    take: Callable[[], tuple[SampledToken, ...]]
    """Gives its tokens."""
    wait: Wait

    def await_input(self, look_up: Callable[[], None] | None = None) -> bool:
        """Return when it is there; False if it never will be, and the step is void."""
        read = self.hidden if isinstance(self.hidden, HiddenRows) else self.fed
        return read is None or read.await_all(look_up)
