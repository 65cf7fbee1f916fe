"""What is said of GPUs that cannot be used, before any weight is read; and shares of one GPU."""

import logging
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from kunserve.core.config import InstanceConfig, KunServeConfig, ModelConfig, SchedulerConfig
from kunserve.core.errors import ConfigError, TooLittleMemory
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.core.plan import CardShare
from kunserve.engine.body import EngineBody
from kunserve.model.packed import FP8_FORMATS, NOTHING_KEPT
from kunserve.server.start.launch import _keeps
from kunserve_extras.torch_body.cuda.backend import CudaBackend
from kunserve_extras.torch_body.cuda.cards import STAND_IN, auto_device, find_cards, find_share
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.cuda.opening import check_torch
from tests.direct_engine import DirectEngine
from tests.fakecuda.library import KIB, MIB, FakeCuda, build
from tests.specs import model_spec
from tests.tiny_models import tiny_model

SPEC = model_spec()


def on_cards(
    num_instances: int = 1, share: float | None = 0.9, num_ranks: int = 1
) -> KunServeConfig:
    base = KunServeConfig()
    return replace(
        base,
        instance=InstanceConfig(
            device=STAND_IN + build(), gpu_memory_utilization=share, tensor_parallel_size=num_ranks
        ),
        cluster=replace(base.cluster, num_instances=num_instances),
    )


def test_a_front_asks_without_torch() -> None:
    asked = "import sys, kunserve_extras.torch_body.front; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


def test_no_driver_is_said() -> None:
    with pytest.raises(ConfigError, match="no NVIDIA driver that can be used.*libnothing"):
        find_cards("libnothing.so")
    with pytest.raises(ConfigError, match="too old: it has no cu"):
        find_cards("libc.so.6")
    assert auto_device("libnothing.so") == "cpu"


def test_a_driver_without_a_gpu(fake: FakeCuda) -> None:
    fake.describe(num_devices=0)
    with pytest.raises(ConfigError, match="finds no GPU"):
        find_share(on_cards(), SPEC)


def test_auto_takes_what_torch_can_use(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.13.0")
    assert auto_device(build()) == "cuda"
    fake.describe(num_devices=0)
    assert auto_device(build()) == "cpu"
    fake.describe(has_virtual_memory=False)
    assert auto_device(build()) == "cpu"
    fake.describe()
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.13.0+cpu")
    assert auto_device(build()) == "cpu"


def test_a_driver_too_old_for_torch() -> None:
    check_torch("12.8", 12020)
    with pytest.raises(ConfigError, match=r"knows CUDA 12\.2, and torch was built for 13\.0"):
        check_torch("13.0", 12020)
    with pytest.raises(ConfigError, match="built without CUDA"):
        check_torch(None, 13000)


def test_a_gpu_that_cannot_map(fake: FakeCuda) -> None:
    fake.describe(has_virtual_memory=False)
    with pytest.raises(ConfigError, match="fake 0 cannot map memory at chosen addresses"):
        find_share(on_cards(), SPEC)
    with pytest.raises(ConfigError, match="cannot map memory at chosen addresses"):
        CudaBackend(torch.device("cpu"), build())


def test_a_gpu_without_the_type(fake: FakeCuda) -> None:
    fake.describe(capability=75)
    with pytest.raises(ConfigError, match=r"capability 8\.0; fake 0 has 7\.5; use --dtype float16"):
        find_share(on_cards(), SPEC)
    find_share(on_cards(), model_spec(dtype="float16"))
    fake.describe(capability=61)
    with pytest.raises(ConfigError, match=r"float32 needs .* 7\.0; fake 0 has 6\.1$"):
        find_share(on_cards(), model_spec(dtype="float32"))


@pytest.mark.parametrize("capability", [80, 86, 89, 90])
def test_the_front_and_the_body_keep_alike(fake: FakeCuda, capability: int) -> None:
    """Ranks expand all."""
    fake.describe(capability=capability)
    kept = _keeps(on_cards(2))
    assert kept == CudaBackend(torch.device("cpu"), build()).kept
    assert kept.formats.issuperset(FP8_FORMATS) == (capability >= 89)
    assert _keeps(on_cards(num_ranks=2)) == NOTHING_KEPT


def test_a_model_for_several_gpus(fake: FakeCuda) -> None:
    large = model_spec(num_layers=8, hidden_size=4096, intermediate_size=4096)
    with pytest.raises(TooLittleMemory, match="holds the whole model on one card"):
        find_share(on_cards(), large)
    half = model_spec(vocab_size=300_000)
    find_share(on_cards(), half)
    with pytest.raises(TooLittleMemory, match="for 2 instances. Give fewer"):
        find_share(on_cards(2), half)
    fake.describe(num_devices=2)
    find_share(on_cards(2), half)


@pytest.mark.parametrize(
    ("instances", "cards", "share"), [(1, 1, 0.9), (2, 1, 0.45), (3, 2, 0.45), (2, 4, 0.9)]
)
def test_instances_share_their_card(
    fake: FakeCuda, instances: int, cards: int, share: float
) -> None:
    fake.describe(num_devices=cards)
    found = find_share(on_cards(instances), SPEC)
    assert found == CardShare(share, int(share * 64 * MIB))


@pytest.mark.parametrize(
    ("instances", "num_ranks", "cards", "share"),
    [(1, 2, 2, 0.9), (1, 2, 1, 0.45), (2, 2, 4, 0.9), (2, 4, 4, 0.45)],
)
def test_each_rank_has_its_share(
    fake: FakeCuda, instances: int, num_ranks: int, cards: int, share: float
) -> None:
    fake.describe(num_devices=cards)
    found = find_share(on_cards(instances, num_ranks=num_ranks), SPEC)
    assert found == CardShare(share, num_ranks * int(share * 64 * MIB))


def test_a_model_that_goes_over_two_gpus_only(fake: FakeCuda) -> None:
    fake.describe(num_devices=2)
    large = model_spec(num_layers=12, hidden_size=1024, intermediate_size=1024, num_heads=8)
    with pytest.raises(TooLittleMemory, match="cannot be served here: see --tensor-parallel-size"):
        find_share(on_cards(), large)
    find_share(on_cards(num_ranks=2), large)
    with pytest.raises(TooLittleMemory, match="on each of 2 ranks; .* for 2 ranks. Give fewer"):
        find_share(on_cards(2, num_ranks=2), large)


def test_without_a_share_nothing_changes(fake: FakeCuda) -> None:
    assert find_share(on_cards(share=None), SPEC) is None
    assert find_share(KunServeConfig(), SPEC) is None


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_what_is_no_share(share: float) -> None:
    with pytest.raises(ConfigError, match="at most 1"):
        InstanceConfig(device="cuda", gpu_memory_utilization=share)
    with pytest.raises(ConfigError, match="needs --device cuda"):
        InstanceConfig(gpu_memory_utilization=0.5)


def test_sizes_by_device() -> None:
    cpu, cuda = (InstanceConfig.of_device(device) for device in ("cpu", "cuda"))
    assert (cpu.block_size, cpu.gpu_memory_utilization) == (16, None)
    assert (cuda.block_size, cuda.gpu_memory_utilization) == (64, 0.9)
    given = InstanceConfig.of_device("cuda", memory_bytes=MIB, block_size=8)
    assert (given.memory_bytes, given.block_size, given.gpu_memory_utilization) == (MIB, 8, None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama", 4).save_pretrained(tmp_path)
    return tmp_path


def open_body(
    folder: Path, number: int, share: float, dtype: Literal["float16", "float32"] = "float32"
) -> EngineBody:
    return EngineBody(
        InstanceId(number),
        ModelConfig(model=str(folder), dtype=dtype),
        InstanceConfig(
            device="cuda", gpu_memory_utilization=share, granule_bytes=8 * KIB, block_size=8
        ),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16),
        backend=CudaBackend(torch.device("cpu"), build()),
    )


def test_a_share_is_of_everything(fake: FakeCuda, folder: Path) -> None:
    """Two instances on one card; the last KiB is not theirs."""
    fake_total = 64 * MIB
    with closing(open_body(folder, 0, 0.5)) as first, closing(open_body(folder, 1, 0.5)) as second:
        taken = fake.used_bytes + 2 * first.account.buffer_bytes
        assert 0.95 * fake_total < taken <= fake_total
        assert first.spec == replace(second.spec, instance_id=InstanceId(0))


def test_what_libraries_take_is_measured(
    fake: FakeCuda, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The stand-in has none: nothing is taken but what was planned, and steps on the host."""
    with caplog.at_level(logging.INFO), closing(open_body(folder, 0, 0.5)) as body:
        assert "recorded steps took at most -0.00 GiB of the device" in caplog.text
        assert body.account.buffer_bytes < 2 << 20


def test_half_precision_is_for_gpus(fake: FakeCuda, folder: Path) -> None:
    with closing(open_body(folder, 0, 0.5, "float16")) as body:
        engine = DirectEngine([(body, LayerRange(0, 4))])
        (tokens,) = engine.generate([[5, 6, 7]], 4)
        assert len(tokens) == 4
    with pytest.raises(ConfigError, match="float16 needs --device cuda"):
        EngineBody(InstanceId(0), ModelConfig(str(folder), dtype="float16"), InstanceConfig())


@pytest.fixture
def unreadable(folder: Path) -> Path:
    """A model whose weights cannot be read: who tries is too late."""
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_busy_gpu_is_said_before_weights_are_read(fake: FakeCuda, unreadable: Path) -> None:
    driver = Driver(library=build())
    others = driver.create(40 * MIB)
    with pytest.raises(TooLittleMemory, match="0.0 GiB of 0.1 GiB left.*other processes use it"):
        open_body(unreadable, 0, 0.5)
    driver.release(others)


def test_too_small_a_share_is_said_too(fake: FakeCuda, unreadable: Path) -> None:
    with pytest.raises(TooLittleMemory, match="Give more with --gpu-memory-utilization"):
        open_body(unreadable, 0, 0.001)
