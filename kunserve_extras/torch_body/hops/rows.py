"""Hidden states of which a ticket tells, and that nobody will ever read."""

import torch

from kunserve.core.faults import StepVoid
from kunserve.engine.cpu.hidden_rows import HiddenRows


class LostRows(HiddenRows):
    """Whoever computes with them learns it. Perhaps nobody does, because their group is no more."""

    def __init__(self, num_rows: int, reason: str) -> None:
        super().__init__(memoryview(b""), 0)
        self.num_rows = num_rows
        self._reason = reason

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Raises StepVoid."""
        raise StepVoid(f"hidden states are lost: {self._reason}")
