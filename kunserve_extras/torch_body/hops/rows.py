"""What lanes and pipes have in common: rows as bytes with a word behind them, and lost ones."""

import torch

from kunserve.core.faults import StepVoid
from kunserve.engine.cpu.hidden_rows import HiddenRows


def with_behind(hidden: torch.Tensor, end: memoryview) -> memoryview:
    """Bytes of hidden states for the wire, and what is to be told behind them."""
    whole = torch.empty(hidden.nbytes + end.nbytes, dtype=torch.uint8)
    whole[: hidden.nbytes].copy_(hidden.view(torch.uint8).flatten())
    data = memoryview(whole.numpy())
    data[hidden.nbytes :] = end
    return data


class LostRows(HiddenRows):
    """A ticket tells of them, and they will never come. Whoever computes with them learns it.
    Perhaps nobody does, because their group is no more.
    """

    def __init__(self, num_rows: int, reason: str) -> None:
        super().__init__(memoryview(b""), 0)
        self.num_rows = num_rows
        self._reason = reason

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Raises StepVoid."""
        raise StepVoid(f"hidden states are lost: {self._reason}")
