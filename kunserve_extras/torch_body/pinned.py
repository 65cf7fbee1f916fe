"""Numbers that go to the device with every step, and come back, without a wait where they are
asked for: in host memory that the device reads and writes by itself.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_SENDS = 8
"""More than two steps send: what is copied behind a step's layers must not hold up the next one."""


class PinnedTurns:
    """Buffers in turn, so that one can be filled while others are still being copied."""

    def __init__(
        self, num_elements: int, dtype: torch.dtype, device: torch.device, num_turns: int = 2
    ) -> None:
        is_cuda = device.type == "cuda"
        self.num_elements = num_elements
        self._buffers = [
            torch.zeros(num_elements, dtype=dtype, pin_memory=is_cuda) for _ in range(num_turns)
        ]
        self._copied: list[torch.cuda.Event] = []
        if is_cuda:
            self._copied = [torch.cuda.Event() for _ in range(num_turns)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def next(self) -> npt.NDArray[np.generic]:
        """The buffer to be filled. Waits until the device has what it was filled with before."""
        if self._copied:
            self._copied[self._turn].synchronize()
        return self._buffers[self._turn].numpy()

    def send(self, target: torch.Tensor) -> None:
        """As much of it as the target holds, without waiting. The next one is next."""
        target.copy_(self._buffers[self._turn][: len(target)], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()
        self._turn = (self._turn + 1) % len(self._buffers)


class Sender:
    """Sends arrays of int64 and float64 to the device, any number of them in one copy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._turns = PinnedTurns(1 << 12, torch.int64, device, _SENDS)

    def send(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, torch.Tensor]:
        """Each array [n] under its name. Nothing is waited for."""
        num_elements = sum(array.size for array in arrays.values())
        if num_elements > self._turns.num_elements:
            self._turns = PinnedTurns(2 * num_elements, torch.int64, self.device, _SENDS)
        flat, first = self._turns.next(), 0
        for array in arrays.values():
            flat[first : first + array.size] = array.view(np.int64)
            first += array.size
        whole = torch.empty(num_elements, dtype=torch.int64, device=self.device)
        self._turns.send(whole)
        parts = whole.split([array.size for array in arrays.values()])
        return {
            name: part.view(torch.float64) if array.dtype == np.float64 else part
            for (name, array), part in zip(arrays.items(), parts, strict=True)
        }


class Coming:
    """A tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        self._here = tensor
        if tensor.is_cuda:
            self._here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._here.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def taken(self) -> list[Any]:
        """Its values, once they are here."""
        if self._done is not None:
            self._done.synchronize()
        return self._here.tolist()  # type: ignore[no-any-return]
