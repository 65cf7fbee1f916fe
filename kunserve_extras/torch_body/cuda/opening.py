"""A device of the driver by its name."""

import torch

from kunserve.core.errors import ConfigError
from kunserve_extras.torch_body.cuda.backend import CudaBackend
from kunserve_extras.torch_body.cuda.cards import STAND_IN, find_cards
from kunserve_extras.torch_body.cuda.driver import LIBRARY


def cards_of(device: str, first: int, number: int) -> list[str]:
    """Names for ``open_card`` of so many ranks of a server; raises ConfigError without a device.

    Ranks take the devices in turn, and ``first`` is how many came before these. A stand-in is one.
    """
    if device.startswith(STAND_IN):
        return [device] * number
    if device != "cuda":
        raise ConfigError(f"the device must be 'cpu' or 'cuda', not {device!r}")
    check_torch(torch.version.cuda, find_cards(LIBRARY)[0].driver_version)
    if not torch.cuda.is_available():
        raise ConfigError("torch finds no CUDA device; `kunserve doctor` says what is missing")
    count = torch.cuda.device_count()
    return [f"cuda:{rank % count}" for rank in range(first, first + number)]


def open_card(card: str) -> CudaBackend:
    """The backend of one device; raises ConfigError where it cannot be used."""
    if card.startswith(STAND_IN):
        return CudaBackend(torch.device("cpu"), card.removeprefix(STAND_IN))
    return CudaBackend(torch.device(card))


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
