"""``kunserve serve --device cuda`` where it cannot be: one clear line, before a weight is read."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from kunserve.cli import main
from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.errors import ConfigError, TooLittleMemory
from kunserve.core.ids import InstanceId
from kunserve.engine.body import EngineBody
from kunserve.engine.weights.loader import WeightLoader
from kunserve.server.start import launch
from kunserve_extras import doctor
from kunserve_extras.torch_body.cuda import cards, opening
from kunserve_extras.torch_body.cuda.backend import CudaBackend
from kunserve_extras.torch_body.cuda.driver import CudaError, Driver
from tests.fakecuda.library import KIB, MIB, FakeCuda, build
from tests.tiny_models import tiny_model


@pytest.fixture
def unreadable(tmp_path: Path) -> str:
    """A model whose weights cannot be read: who tries says something else."""
    tiny_model("llama", 4).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    return str(tmp_path)


@pytest.fixture(autouse=True)
def no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the process closes it, and here that is long after."""
    listener = SimpleNamespace(getsockname=lambda: ("127.0.0.1", 0), close=lambda: None)
    monkeypatch.setattr(launch, "_listen", lambda host, port: listener)


def serve(*flags: str) -> str:
    """What a start that must fail says."""
    result = CliRunner().invoke(main, ["serve", *flags, "--device", "cuda", "--port", "0"])
    assert result.exit_code == 1 and result.exception is not None, result.output
    lines = result.output.strip().splitlines()
    assert len(lines) == 1 and "Traceback" not in result.output, result.output
    return lines[0]


@pytest.mark.parametrize(
    ("library", "said"),
    [
        ("libnothing.so", "no NVIDIA driver that can be used: libnothing.so"),
        ("libc.so.6", "no NVIDIA driver that can be used: libc.so.6 is too old: it has no cu"),
    ],
)
def test_a_driver_that_is_none(
    library: str, said: str, unreadable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cards, "LIBRARY", library)
    assert said in serve(unreadable)


def no_gpu(fake: FakeCuda) -> None:
    fake.describe(num_devices=0)


def no_mapping(fake: FakeCuda) -> None:
    fake.describe(has_virtual_memory=False)


def too_old_a_gpu(fake: FakeCuda) -> None:
    fake.describe(capability=61)


def a_small_gpu(fake: FakeCuda) -> None:
    FakeCuda(total_bytes=128 * KIB)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (no_gpu, "the driver finds no GPU"),
        (no_mapping, "fake 0 cannot map memory at chosen addresses, which drops need: use another"),
        (too_old_a_gpu, "needs a GPU of compute capability 7.0; fake 0 has 6.1"),
        (a_small_gpu, "holds the whole model on one card, so this model cannot be served here"),
    ],
)
def test_a_gpu_that_will_not_do(
    fake: FakeCuda,
    change: Callable[[FakeCuda], None],
    said: str,
    unreadable: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cards, "LIBRARY", build())
    change(fake)
    assert said in serve(unreadable, "--dtype", "float32")
    assert said in serve(unreadable, "--dtype", "float32", "--instance-memory", "16MiB")


def test_a_driver_older_than_torch(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said by each instance, because the front does without torch."""
    fake.describe(version=12020)
    monkeypatch.setattr(opening, "LIBRARY", build())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"driver is too old: it knows CUDA 12\.2, and torch"):
        opening.cards_of("cuda", 0, 1)


def test_a_busy_gpu_with_memory_given(
    fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(loader: WeightLoader) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(WeightLoader, "check", read)
    tiny_model("llama", 4).save_pretrained(tmp_path)
    driver = Driver(library=build())
    others = driver.create(60 * MIB)
    with pytest.raises(TooLittleMemory, match=r"has 4\.0 MiB of 64\.0 MiB left.*nvidia-smi"):
        EngineBody(
            InstanceId(0),
            ModelConfig(str(tmp_path), dtype="float32"),
            InstanceConfig(
                device="cuda", memory_bytes=8 * MIB, granule_bytes=8 * KIB, block_size=8
            ),
            backend=CudaBackend(torch.device("cpu"), build()),
        )
    driver.release(others)


def test_the_doctor_says_so_before(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(subject: str) -> str:
        return " ".join(
            finding.text for finding in doctor._devices(build()) if finding.subject == subject
        )

    fake.describe(version=12020, has_virtual_memory=False, can_export=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "memory cannot be mapped at chosen addresses" in said("device 0")
    assert "KV between instances goes through sockets" in said("device 0")
    assert "the NVIDIA driver is too old" in said("CUDA")
    fake.describe(num_devices=0)
    assert "refuses" in said("CUDA")
    with pytest.raises(CudaError):
        Driver(library=build())
