"""Which backend an instance gets, by its device and its ranks."""

from types import SimpleNamespace

import pytest
import torch

from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.errors import ConfigError
from kunserve.core.ids import InstanceId
from kunserve.engine.backend import Backend, CpuBackend
from kunserve.engine.devices import open_backend
from kunserve_extras.device_ranks.backend import DeviceRanksBackend
from kunserve_extras.ranks.backend import RankedBackend
from kunserve_extras.torch_body.cuda import opening
from kunserve_extras.torch_body.cuda.backend import CudaBackend
from kunserve_extras.torch_body.cuda.cards import STAND_IN
from kunserve_extras.torch_body.cuda.opening import cards_of
from tests.fakecuda.library import build


def backend_of(device: str, num_ranks: int = 1) -> Backend:
    config = InstanceConfig(device=device, tensor_parallel_size=num_ranks)
    source: object = SimpleNamespace()
    return open_backend(ModelConfig(), source, config, InstanceId(1))  # type: ignore[arg-type]


def test_each_name_has_its_backend() -> None:
    assert isinstance(backend_of("cpu"), CpuBackend)
    assert isinstance(backend_of("cpu", 2), RankedBackend)
    one, ranks = backend_of(STAND_IN + build()), backend_of(STAND_IN + build(), 2)
    assert isinstance(one, CudaBackend) and one.device.type == "cpu"
    assert isinstance(ranks, DeviceRanksBackend) and ranks.device.type == "cpu"


def test_what_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'cpu' or 'cuda', not 'tpu'"):
        backend_of("tpu")
    monkeypatch.setattr(opening, "LIBRARY", "libnothing.so")
    with pytest.raises(ConfigError, match="no NVIDIA driver"):
        backend_of("cuda")
    monkeypatch.setattr(opening, "LIBRARY", build())
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device; `kunserve doctor`"):
        backend_of("cuda")


@pytest.mark.parametrize(
    ("count", "instance", "num_ranks", "cards"),
    [
        (4, 1, 1, ["cuda:1"]),
        (4, 1, 2, ["cuda:2", "cuda:3"]),
        (4, 2, 2, ["cuda:0", "cuda:1"]),
        (3, 1, 2, ["cuda:2", "cuda:0"]),
        (1, 0, 2, ["cuda:0", "cuda:0"]),
    ],
)
def test_ranks_take_the_devices_in_turn(
    count: int,
    instance: int,
    num_ranks: int,
    cards: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that an instance's are on different ones where there are enough."""
    monkeypatch.setattr(opening, "LIBRARY", build())
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert cards_of("cuda", instance * num_ranks, num_ranks) == cards
