"""Refuses what torch on a GPU would refuse, while device and host are both this machine's memory.

A tensor lies on the device if it was made for ``DEVICE`` (``cpu:0``, for torch as good as ``cpu``),
or from such tensors. Operations over both kinds fail, as do NumPy's views of the device's. Values
are real, so whatever tests tokens can run within.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cpu", 0)
_HOST = torch.device("cpu")
_MARK = "_lies_on_the_device"
_COPIES = {
    torch.Tensor.copy_,
    torch.Tensor.to,
    torch.Tensor.__setitem__,
    torch.Tensor.__getitem__,
}
"""From one to the other is what they are for; the last two take indices of the host."""
_VIEWS = {torch.Tensor.numpy, torch.Tensor.__array__}


class Mixed(AssertionError):
    """One operation over tensors of both."""


class StrictDevice(TorchFunctionMode):
    """A context. ``num_checked`` operations were over tensors of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.num_checked = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):  # a tape does what was looked at before
            return func(*args, **kwargs)
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return DEVICE if lies_on_device(args[0]) else _HOST
        tensors = list(_tensors((*args, *kwargs.values())))
        here = [one for one in tensors if lies_on_device(one)]
        self.num_checked += bool(here)
        if here and func in _VIEWS:
            raise Mixed(f"{_name(func)} of a tensor on the device")
        if here and func not in _COPIES:
            others = [one for one in tensors if not lies_on_device(one) and one.dim() > 0]
            if others:
                shapes = [tuple(one.shape) for one in tensors]
                raise Mixed(f"{_name(func)} over tensors of both, {shapes}")
        result = func(*args, **kwargs)
        if func in (torch.Tensor.copy_, torch.Tensor.__setitem__):
            return result
        if _is_made_here(func, args, kwargs, bool(here)):
            for one in _tensors((result,)):
                setattr(one, _MARK, True)
        elif isinstance(result, torch.Tensor) and lies_on_device(result):
            return result.clone()  # torch gives the same tensor where a device would give a copy
        return result

    def __enter__(self) -> "StrictDevice":
        """Storage over an address is of ``cpu``, because torch compares devices there."""
        real = self._real = torch._C._construct_storage_from_data_pointer

        def construct(address: int, device: torch.device, num_bytes: int) -> torch.UntypedStorage:
            return real(address, _HOST, num_bytes)

        torch._C._construct_storage_from_data_pointer = construct
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._construct_storage_from_data_pointer = self._real


def lies_on_device(tensor: torch.Tensor) -> bool:
    """Whether it was made for the device, or from what was."""
    return getattr(tensor, _MARK, False)


def _is_made_here(
    func: Callable[..., Any], args: Any, kwargs: dict[str, Any], is_here: bool
) -> bool:
    """Whether a result lies on the device. ``is_here``: something that it is made from does."""
    if func is torch.Tensor.cpu:
        return False
    named = kwargs.get("device")
    if func is torch.Tensor.to and isinstance(args[1], torch.Tensor):
        return lies_on_device(args[1])
    if func is torch.Tensor.to:
        named = next((one for one in args[1:] if isinstance(one, torch.device | str)), named)
    if named is None:
        return is_here
    return torch.device(named) == DEVICE


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for one in values:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))
