"""A model's shape and its end-of-sequence tokens, from ``config.json`` or GGUF metadata."""

import json
import sys
from pathlib import Path
from typing import Any

from kunserve.core.errors import ConfigError, ModelFiles, UnsupportedModel
from kunserve.core.model_spec import DTYPE_BYTES, ModelSpec
from kunserve.model.gguf_config import eos_ids_from_gguf, spec_from_gguf
from kunserve.model.gguf_file import read_gguf
from kunserve.model.source import ModelSource

_REQUIRED = object()

_ROPE_KEYS = frozenset(
    (
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
        "partial_rotary_factor",
    )
)
"""What plain rotary embeddings and Llama 3's are described by."""

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


def read_spec(source: ModelSource, dtype: str) -> ModelSpec:
    """The model's shape, held in ``dtype``.

    Raises UnsupportedModel for what we do not implement, ModelFiles for what cannot be read.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, not {dtype!r}")
    if source.is_gguf:
        return spec_from_gguf(read_gguf(source.path), source.name, dtype)
    path = source.path / "config.json"
    return spec_from_hf(_HfConfig(path, read_json(path)), source.name, dtype)


def read_eos_ids(source: ModelSource) -> tuple[int, ...]:
    """Every token that ends a reply, from the generation config and the model's config."""
    if source.is_gguf:
        return eos_ids_from_gguf(read_gguf(source.path))
    for file in ("generation_config.json", "config.json"):
        path = source.path / file
        if not path.is_file():
            continue
        value = read_json(path).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found = [token for token in ids if isinstance(token, int)]
        if found:
            # The generation config is the later word; the model's own is only a fallback.
            return tuple(dict.fromkeys(found))
    return ()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelFiles says what is wrong with it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFiles(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFiles(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFiles(f"{path}: not a JSON object")
    return value


class _HfConfig:
    """A ``config.json`` whose values are checked as they are read."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values
        self.rope = _rope_values(path, values)

    def integer(self, key: str, default: Any = _REQUIRED) -> int:
        """A positive integer."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelFiles(f"{self.path}: {key!r} is {value!r}, not a positive integer")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A positive number."""
        return self.positive(key, self._get(key, default))

    def positive(self, key: str, value: Any) -> float:
        """The value of ``key`` as a positive number, not infinite."""
        if value is None:
            raise ModelFiles(f"{self.path}: {key!r} is missing")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:
            raise ModelFiles(f"{self.path}: {key!r} is {value!r}, not a positive number")
        return float(value)

    def window(self) -> int | None:
        """The sliding window; a missing key means the library's default, null and 0 none."""
        value = self.values.get("sliding_window", 4096)
        if value is None or value == 0:
            return None
        return self.integer("sliding_window", value)

    def flag(self, key: str) -> bool:
        """A boolean, false when missing."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelFiles(f"{self.path}: {key!r} is {value!r}, neither true nor false")
        return bool(value)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise ModelFiles(f"{self.path}: {key!r} is missing")
            return default
        return value


def _rope_values(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """What is said of the rotary embedding; transformers 5 writes one object for older two keys."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = values.get(key) or {}
        if not isinstance(rope, dict):
            raise ModelFiles(f"{path}: {key!r} is not an object")
        rope = {name: value for name, value in rope.items() if value is not None}
        unknown = sorted(rope.keys() - _ROPE_KEYS)
        if unknown and rope.get("rope_type", rope.get("type")) in (None, "default", "llama3"):
            raise UnsupportedModel(f"{path}: {key!r} with {', '.join(unknown)} is not supported")
        if rope:
            return rope
    return {}


def spec_from_hf(config: _HfConfig, name: str, dtype: str) -> ModelSpec:
    """The shape that a Hugging Face configuration describes."""
    architecture = _architecture(config)
    _refuse_unsupported(config)
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    hidden_size = config.integer("hidden_size")
    if num_heads % num_kv_heads:
        raise ModelFiles(
            f"{config.path}: {num_heads} attention heads cannot share {num_kv_heads} KV heads"
        )
    max_position = config.integer("max_position_embeddings")
    num_layers = config.integer("num_hidden_layers")
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    biased = config.flag("attention_bias") and architecture != "MistralForCausalLM"
    return ModelSpec(
        name=name,
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.integer("head_dim", hidden_size // num_heads),
        vocab_size=config.integer("vocab_size"),
        max_position=max_position,
        rope_theta=_rope_theta(config),
        rms_eps=config.number("rms_norm_eps", 1e-6),
        tied_embeddings=config.flag("tie_word_embeddings"),
        attention_bias=is_qwen2 or biased,
        output_bias=biased and not is_qwen2,
        mlp_bias=config.flag("mlp_bias") and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        rope_scaling=_rope_scaling(config),
        sliding_window=_sliding_window(config, architecture, num_layers, max_position),
        dtype=dtype,
    )


def _architecture(config: _HfConfig) -> str:
    names = config.values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelFiles(f"{config.path}: 'architectures' is missing, so the model is unknown")
    if names[0] not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModel(
            f"{config.path}: architecture {names[0]} is not supported; "
            f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return names[0]


def _refuse_unsupported(config: _HfConfig) -> None:
    values = config.values
    quantised = values.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise UnsupportedModel(
            f"{config.path}: weights quantised by {method} are not supported; use the original, "
            "or a GGUF file"
        )
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"{config.path}: activation {activation!r} is not supported")
    if (
        values.get("partial_rotary_factor", 1) != 1
        or config.rope.get("partial_rotary_factor", 1) != 1
    ):
        raise UnsupportedModel(f"{config.path}: partial rotary embedding is not supported")


def _rope_theta(config: _HfConfig) -> float:
    theta = config.rope.get("rope_theta")
    if theta is None:
        return config.number("rope_theta", 10000.0)
    return config.positive("rope_theta", theta)


def _rope_scaling(config: _HfConfig) -> tuple[float, float, float, int] | None:
    rope = config.rope
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnsupportedModel(
            f"{config.path}: rope scaling {kind!r} is not supported, only 'llama3'"
        )
    factor, low, high, original = (
        config.positive(key, rope.get(key))
        for key in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
    )
    if low >= high:
        raise ModelFiles(
            f"{config.path}: llama3 rope scaling has no range from {low:g} to {high:g}"
        )
    return factor, low, high, int(original)


def _sliding_window(
    config: _HfConfig, architecture: str, num_layers: int, max_position: int
) -> int | None:
    """The window, where every layer has it; a mixture is not supported."""
    values = config.values
    if architecture == "MistralForCausalLM":
        window = config.window()
    elif architecture.startswith("Qwen") and config.flag("use_sliding_window"):
        window = config.window()
        kinds = values.get("layer_types")
        first = values.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise ModelFiles(f"{config.path}: 'max_window_layers' is {first!r}, no layer")
        windowed = (
            [kind == "sliding_attention" for kind in kinds]
            if isinstance(kinds, list)
            else [layer >= first for layer in range(num_layers)]
        )
        if not any(windowed):
            window = None
        elif not all(windowed) and window is not None and window < max_position:
            raise UnsupportedModel(
                f"{config.path}: a sliding window in only some layers is not supported"
            )
    else:
        window = None
    return window if window is not None and window < max_position else None
