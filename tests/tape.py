"""Graphs without a GPU: operations of torch are written down, and done again with the same tensors.

As on a device, whatever the host computes is not recorded, and stays as it was.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class PlainDispatchMode(TorchDispatchMode):
    """Without what keeps torch's compiler out, which would load it: six seconds in each process."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Tape(PlainDispatchMode):
    """One recorded piece of work."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, tuple[torch.Tensor, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        assert _tensors(result), f"{func} asks the device for a value"
        if not func.is_view:  # a view stays one of what is computed anew
            self._calls.append((func, args, kwargs or {}, _tensors(result)))
        return result

    def replay(self) -> None:
        """No mode sees it: each operation was looked at when it was recorded."""
        with torch._C.DisableTorchFunction():
            for func, args, kwargs, recorded in self._calls:
                made = func(*args, **kwargs)
                if made is recorded[0]:  # computed in its place, as most is
                    continue
                for result, place in zip(_tensors(made), recorded, strict=True):
                    if result.data_ptr() != place.data_ptr():
                        place.copy_(result)


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    several = result if isinstance(result, list | tuple) else (result,)
    return tuple(one for one in several if isinstance(one, torch.Tensor))


class TapeRecorder:
    """Implements ``Recorder``. What it recorded can be counted, and forbidden."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.is_closed = False

    def warm_up(self, work: Callable[[], None]) -> None:
        work()

    def record(self, work: Callable[[], None]) -> Tape:
        assert not self.is_closed, "recorded anew"
        self.num_recorded += 1
        tape = Tape()
        with tape:
            work()
        return tape
