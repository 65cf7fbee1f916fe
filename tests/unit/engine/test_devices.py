"""Which backend a device's name gives."""

import pytest
import torch

from kunserve.core.errors import ConfigError
from kunserve.core.ids import InstanceId
from kunserve.engine import devices
from kunserve.engine.backend import CpuBackend
from kunserve.engine.cuda.backend import CudaBackend
from kunserve.engine.devices import STAND_IN, open_backend
from tests.fakecuda.library import build


def test_each_name_has_its_backend() -> None:
    assert isinstance(open_backend("cpu", InstanceId(1)), CpuBackend)
    stand_in = open_backend(STAND_IN + build(), InstanceId(1))
    assert isinstance(stand_in, CudaBackend) and stand_in.device.type == "cpu"


def test_what_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'cpu' or 'cuda', not 'tpu'"):
        open_backend("tpu", InstanceId(0))
    monkeypatch.setattr(devices, "LIBRARY", "libnothing.so")
    with pytest.raises(ConfigError, match="no NVIDIA driver"):
        open_backend("cuda", InstanceId(0))
    monkeypatch.setattr(devices, "LIBRARY", build())
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device; `kunserve doctor`"):
        open_backend("cuda", InstanceId(0))
