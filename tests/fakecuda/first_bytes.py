"""Operations that are launched as Triton launches kernels: the driver is asked about every pointer.

The launcher asks for the first byte of each tensor only, and refuses one that is not mapped, though
a kernel would not touch it. The interpreter and plain torch do not ask.
"""

from collections.abc import Iterator
from typing import Any

import torch

from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.ops.expert_room import ExpertRoom
from kunserve_extras.torch_body.ops.reference import ReferenceOps
from kunserve_extras.torch_body.ops.table import DeviceBatch
from tests.fakecuda.library import FakeCuda


class LaunchedOps:
    """Implements ``Ops`` by ``ReferenceOps``. ``num_asked`` is how many pointers were looked at."""

    def __init__(self, spec: ModelSpec, fake: FakeCuda) -> None:
        self._ops = ReferenceOps(spec)
        self._fake = fake
        self.num_asked = 0

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._ops, name)

        def launch(*arguments: Any) -> None:
            for number, tensor in enumerate(_tensors(arguments)):
                self.num_asked += 1
                what = f"{name}: pointer {number}, {tuple(tensor.shape)}"
                assert self._fake.is_reachable(tensor.data_ptr()), f"{what} cannot be accessed"
            operation(*arguments)

        return launch


def _tensors(arguments: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for one in arguments:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, tuple):
            yield from _tensors(one)
        elif isinstance(one, ExpertRoom):
            yield from one.tensors
        elif isinstance(one, DeviceBatch):
            yield from (one.entries, one.offsets, one.tables, one.q_starts, one.context_lens)
