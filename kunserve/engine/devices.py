"""The backend for a device by its name."""

import torch

from kunserve.core.errors import ConfigError
from kunserve.core.ids import InstanceId
from kunserve.engine.backend import Backend, CpuBackend
from kunserve.engine.cuda.backend import CudaBackend

STAND_IN = "stand-in:"
"""Before the path of a library in libcuda's place, for tests."""


def open_backend(device: str, instance_id: InstanceId) -> Backend:
    """The backend of an instance; raises ConfigError where there is no such device.

    Instances take the CUDA devices in turn.
    """
    if device == "cpu":
        return CpuBackend()
    if device.startswith(STAND_IN):
        return CudaBackend(torch.device("cpu"), device.removeprefix(STAND_IN))
    if device != "cuda":
        raise ConfigError(f"the device must be 'cpu' or 'cuda', not {device!r}")
    if not torch.cuda.is_available():
        raise ConfigError("torch finds no CUDA device; `kunserve doctor` says what is missing")
    return CudaBackend(torch.device("cuda", instance_id % torch.cuda.device_count()))
