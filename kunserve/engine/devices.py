"""The backend for a device by its name."""

import torch

from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.errors import ConfigError
from kunserve.core.ids import InstanceId
from kunserve.engine.backend import Backend, CpuBackend
from kunserve.engine.cuda.backend import CudaBackend
from kunserve.engine.cuda.cards import STAND_IN, find_cards
from kunserve.engine.cuda.driver import LIBRARY
from kunserve.engine.ranks.backend import RankedBackend
from kunserve.model.source import ModelSource


def open_ranks(model: ModelConfig, source: ModelSource, config: InstanceConfig) -> Backend | None:
    """The backend of an instance of several ranks; None for one of a single rank.

    Raises ConfigError for settings that do not go over ranks.
    """
    num_ranks = config.tensor_parallel_size
    return None if num_ranks == 1 else RankedBackend(model, source, num_ranks)


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
    check_torch(torch.version.cuda, find_cards(LIBRARY)[0].driver_version)
    if not torch.cuda.is_available():
        raise ConfigError("torch finds no CUDA device; `kunserve doctor` says what is missing")
    return CudaBackend(torch.device("cuda", instance_id % torch.cuda.device_count()))


def check_torch(built_for: str | None, driver_version: int) -> None:
    """Raise ConfigError unless torch was built for CUDA, and for one that the driver knows.

    A driver runs what was built for any minor version of the CUDA that it knows.
    """
    if built_for is None:
        raise ConfigError(
            f"--device cuda: torch {torch.__version__} was built without CUDA; install another "
            "build (`pip install torch` gives it)"
        )
    if int(built_for.partition(".")[0]) > driver_version // 1000:
        known = f"{driver_version // 1000}.{driver_version % 1000 // 10}"
        raise ConfigError(
            f"the NVIDIA driver is too old: it knows CUDA {known}, and torch was built for "
            f"{built_for}. Install a newer driver, or a torch for its CUDA"
        )
