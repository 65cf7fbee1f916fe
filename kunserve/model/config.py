"""A model's shape and its end-of-sequence tokens, from ``config.json`` or GGUF metadata."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from kunserve.core.errors import ConfigError, ModelFiles, UnsupportedModel
from kunserve.model.gemma import GEMMA3, GEMMA_ARCHITECTURES, gemma_values, with_gemma
from kunserve.model.gguf.config import eos_ids_from_gguf, spec_from_gguf
from kunserve.model.gguf.file import read_gguf
from kunserve.model.granite import with_granite_scales
from kunserve.model.json_file import read_json
from kunserve.model.moe_config import experts_from_hf, inner_size_from_hf
from kunserve.model.quantization import check_quantization
from kunserve.model.rope import (
    LinearRope,
    Llama3Rope,
    RopeScaling,
    YarnRope,
    reach_of,
    yarn_amplitude,
)
from kunserve.model.smollm3 import SMOLLM3, unturned_of_hf
from kunserve.model.source import ModelSource
from kunserve.model.spec import DTYPE_BYTES, ModelSpec

_REQUIRED = object()

_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_SCALING_KEYS = {
    "default": {
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    },
    "linear": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}
"""What each kind of rotary embedding is described by, beside ``_ROPE_KEYS``."""

SUPPORTED_ARCHITECTURES = (
    "Ernie4_5ForCausalLM",
    *GEMMA_ARCHITECTURES,
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SeedOssForCausalLM",
    SMOLLM3,
)


def read_spec(source: ModelSource, dtype: str, *, computed_elsewhere: bool = False) -> ModelSpec:
    """The model's shape, held in ``dtype``.

    Raises UnsupportedModel for what we do not implement, ModelFiles for what cannot be read. Where
    it is ``computed_elsewhere``, by another engine, only its sizes matter.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, not {dtype!r}")
    if source.is_gguf:
        return spec_from_gguf(read_gguf(source.path), source.name, dtype)
    path = source.path / "config.json"
    values = gemma_values(path, read_json(path))
    config = _HfConfig(path, values)
    return spec_from_hf(config, source.name, dtype, computed_elsewhere=computed_elsewhere)


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

    def number_or_none(self, key: str) -> float | None:
        """A positive number, if there is one."""
        return None if self.values.get(key) is None else self.number(key)

    def positive(self, key: str, value: Any) -> float:
        """The value of ``key`` as a positive number, not infinite."""
        if value is None:
            raise ModelFiles(f"{self.path}: {key!r} is missing")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:
            raise ModelFiles(f"{self.path}: {key!r} is {value!r}, not a positive number")
        return float(value)

    def window(self, default: int | None = 4096) -> int | None:
        """The sliding window; a missing key means the library's default, null and 0 none."""
        value = self.values.get("sliding_window", default)
        if value is None or value == 0:
            return None
        return self.integer("sliding_window", value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelFiles(f"{self.path}: {key!r} is {value!r}, neither true nor false")
        return value

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
        kind = rope.get("rope_type", rope.get("type", "default"))
        known = _SCALING_KEYS.get(kind) if isinstance(kind, str) else None
        unknown = [] if known is None else sorted(rope.keys() - known - _ROPE_KEYS)
        if unknown:
            raise UnsupportedModel(f"{path}: {key!r} with {', '.join(unknown)} is not supported")
        if rope:
            return rope
    return {}


def spec_from_hf(
    config: _HfConfig, name: str, dtype: str, *, computed_elsewhere: bool = False
) -> ModelSpec:
    """The shape that a Hugging Face configuration describes."""
    architecture = _architecture(config, computed_elsewhere)
    if not computed_elsewhere:
        _refuse_unsupported(config)
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    hidden_size = config.integer("hidden_size")
    if num_heads % num_kv_heads:
        raise ModelFiles(
            f"{config.path}: {num_heads} attention heads cannot share {num_kv_heads} KV heads"
        )
    rope_scaling = _rope_scaling(config)
    max_position = reach_of(rope_scaling, config.integer("max_position_embeddings"))
    num_layers = config.integer("num_hidden_layers")
    attention_bias, output_bias, mlp_bias = _biases(config, architecture)
    window, global_layers = _windows(config, architecture, num_layers, max_position)
    spec = ModelSpec(
        name=name,
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=inner_size_from_hf(config, architecture),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.integer("head_dim", hidden_size // num_heads),
        vocab_size=config.integer("vocab_size"),
        max_position=max_position,
        rope_theta=_rope_theta(config, architecture),
        rms_eps=config.number("rms_norm_eps", _OTHER_EPS.get(architecture, 1e-6)),
        tied_embeddings=config.flag("tie_word_embeddings", architecture in _TIED_BY_DEFAULT),
        attention_bias=attention_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=architecture in _QK_NORMS,
        rope_scaling=rope_scaling,
        sliding_window=window,
        global_layers=global_layers,
        dtype=dtype,
        has_fused_projections=architecture == "Phi3ForCausalLM",
        has_paired_rope=architecture == "Ernie4_5ForCausalLM",
        experts=experts_from_hf(config, architecture),
        has_whole_qk_norm=architecture == "OlmoeForCausalLM",
    )
    return _with_factors(config, spec)


def _with_factors(config: _HfConfig, spec: ModelSpec) -> ModelSpec:
    """What Gemma, Granite and SmolLM3 have beside a Llama's shape."""
    architecture = spec.architecture
    if architecture in GEMMA_ARCHITECTURES:
        is_third = architecture == GEMMA3
        return with_gemma(
            spec,
            query_scalar=config.number("query_pre_attn_scalar"),
            local_theta=config.number("rope_local_base_freq") if is_third else None,
            score_cap=None if is_third else config.number_or_none("attn_logit_softcapping"),
            logit_cap=config.number_or_none("final_logit_softcapping"),
            max_position=config.integer("max_position_embeddings"),
        )
    if architecture == SMOLLM3:
        unturned = unturned_of_hf(config.path, config.values, spec.num_layers)
        return dataclasses.replace(spec, unturned_layers=unturned)
    if architecture != "GraniteForCausalLM":
        return spec
    return with_granite_scales(
        spec,
        embedding=config.number("embedding_multiplier", 1.0),
        residual=config.number("residual_multiplier", 1.0),
        attention=config.number("attention_multiplier", 1.0),
        logits=config.number("logits_scaling", 1.0),
    )


_TIED_BY_DEFAULT = ("Ernie4_5ForCausalLM", SMOLLM3)
"""Whose configurations in ``transformers`` tie embeddings unless they say otherwise."""
_OTHER_EPS = {"MixtralForCausalLM": 1e-5, "OlmoeForCausalLM": 1e-5}
_OTHER_THETA = {"MixtralForCausalLM": 1e6, SMOLLM3: 2e6}
_QK_NORMS = ("OlmoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", GEMMA3)
_NO_BIASES = ("MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM")
_NO_MLP_BIAS = (*_QK_NORMS, *GEMMA_ARCHITECTURES)


def _biases(config: _HfConfig, architecture: str) -> tuple[bool, bool, bool]:
    """Whether q, k and v carry a bias, attention's output, and the three of the MLP."""
    match architecture:
        case "Qwen2ForCausalLM":
            return True, False, False
        case name if name in _NO_BIASES:
            return False, False, False
        case "Qwen2MoeForCausalLM":
            return config.flag("qkv_bias", True), False, False
        case "Ernie4_5ForCausalLM":
            biased = config.flag("use_bias")
            return biased, biased, biased
        case "SeedOssForCausalLM":
            attention = config.flag("attention_bias", True)
            return attention, config.flag("attention_out_bias"), config.flag("mlp_bias")
    biased = config.flag("attention_bias")
    return biased, biased, config.flag("mlp_bias") and architecture not in _NO_MLP_BIAS


def _architecture(config: _HfConfig, is_any: bool) -> str:
    names = config.values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelFiles(f"{config.path}: 'architectures' is missing, so the model is unknown")
    if names[0] not in SUPPORTED_ARCHITECTURES and not is_any:
        raise UnsupportedModel(
            f"{config.path}: architecture {names[0]} is not supported; "
            f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return names[0]


def _refuse_unsupported(config: _HfConfig) -> None:
    values = config.values
    check_quantization(config.path, values.get("quantization_config"))
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"{config.path}: activation {activation!r} is not supported")
    turned = values.get("partial_rotary_factor"), config.rope.get("partial_rotary_factor")
    if any(share not in (None, 1) for share in turned):  # null is the default, as elsewhere
        raise UnsupportedModel(f"{config.path}: partial rotary embedding is not supported")


def _rope_theta(config: _HfConfig, architecture: str) -> float:
    theta = config.rope.get("rope_theta")
    if theta is None:
        return config.number("rope_theta", _OTHER_THETA.get(architecture, 10000.0))
    return config.positive("rope_theta", theta)


def _rope_scaling(config: _HfConfig) -> RopeScaling | None:
    rope = config.rope
    kind = rope.get("rope_type", rope.get("type", "default"))
    match kind:
        case "default":
            return None
        case "linear":
            return LinearRope(config.positive("factor", rope.get("factor")))
        case "llama3":
            return _llama3_rope(config)
        case "yarn":
            return _yarn_rope(config)
    raise UnsupportedModel(
        f"{config.path}: rope scaling {kind!r} is not supported, only 'linear', 'llama3' and 'yarn'"
    )


def _llama3_rope(config: _HfConfig) -> Llama3Rope:
    factor, low, high, original = (
        config.positive(key, config.rope.get(key))
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
    return Llama3Rope(factor, low, high, int(original))


def _yarn_rope(config: _HfConfig) -> YarnRope:
    def of_rope(key: str, default: Any = None) -> float:
        return config.positive(key, config.rope.get(key, default))

    factor = of_rope("factor")
    amplitude = yarn_amplitude(factor)
    if "attention_factor" in config.rope:
        amplitude = of_rope("attention_factor")
    elif config.rope.get("mscale") and config.rope.get("mscale_all_dim"):
        amplitude = yarn_amplitude(factor, of_rope("mscale"))
        amplitude /= yarn_amplitude(factor, of_rope("mscale_all_dim"))
    trained = config.integer("max_position_embeddings")
    return YarnRope(
        factor=factor,
        original_max_position=int(of_rope("original_max_position_embeddings", trained)),
        amplitude=amplitude,
        beta_fast=of_rope("beta_fast", 32.0),
        beta_slow=of_rope("beta_slow", 1.0),
        rounds_ramp=config.rope.get("truncate", True) is not False,
    )


def _windows(
    config: _HfConfig, architecture: str, num_layers: int, max_position: int
) -> tuple[int | None, tuple[int, ...]]:
    """The window, and the layers that have none where others have."""
    if architecture in _NO_BIASES:
        window = config.window(4096 if architecture == "MistralForCausalLM" else None)
        is_local = [True] * num_layers
    elif architecture in GEMMA_ARCHITECTURES:
        window, is_local = config.window(), _local_layers(config, num_layers)
        # Their rotary embedding is another one even if no request gets beyond the window.
        max_position = max(max_position, (window or 0) + 1)
    elif architecture.startswith("Qwen") and config.flag("use_sliding_window"):
        window, is_local = config.window(), _local_layers(config, num_layers)
    else:
        return None, ()
    if window is None or window >= max_position or not any(is_local):
        return None, ()
    return window, tuple(layer for layer in range(num_layers) if not is_local[layer])


def _local_layers(config: _HfConfig, num_layers: int) -> list[bool]:
    """Whether each layer has the window."""
    kinds = config.values.get("layer_types")
    if kinds is None:
        first = config.values.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise ModelFiles(f"{config.path}: 'max_window_layers' is {first!r}, no layer")
        return [layer >= first for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelFiles(f"{config.path}: 'layer_types' does not name {num_layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(f"{config.path}: a layer of {kind!r} is not supported")
    return [kind == "sliding_attention" for kind in kinds]
