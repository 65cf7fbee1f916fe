"""Counts what the host asks a device for: a launch for each kernel, and for each recorded graph."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kunserve_extras.torch_body.ops.reference import ReferenceOps
from tests.tape import PlainDispatchMode, Tape

KERNELS = {"rms_norm": 1, "gate_mul": 1, "place": 1, "attend": 3}
KERNELS |= {"route": 3, "run_experts": 2, "sum_experts": 1}
"""Of Triton, of which each operation of ``ReferenceOps`` stands for so many in a mixed step."""
_NOTHING = ("aten.empty", "aten.lift_fresh", "aten.detach", "aten._to_copy")
"""Memory that torch has already, and numbers of the host."""


class Launches(PlainDispatchMode):
    """A context. Operations of torch count as they are, but for views of what is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.num = 0
        self._is_inside = False
        for kind, name, num in (
            *((ReferenceOps, name, num) for name, num in KERNELS.items()),
            (Tape, "replay", 1),
        ):
            monkeypatch.setattr(kind, name, self._as_launch(getattr(kind, name), num))

    def _as_launch(self, work: Callable[..., None], num: int) -> Callable[..., None]:
        def launch(*given: Any) -> None:
            with self._of(num):
                work(*given)

        return launch

    @contextmanager
    def _of(self, num: int) -> Iterator[None]:
        self.num += 0 if self._is_inside else num
        before, self._is_inside = self._is_inside, True
        yield
        self._is_inside = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_view = func.is_view or str(func).startswith(_NOTHING)
        self.num += not (self._is_inside or is_view)
        return func(*args, **(kwargs or {}))
