"""A model's shape from GGUF metadata."""

import dataclasses
import math
import struct

from kunserve.core.errors import ModelFiles, UnsupportedModel
from kunserve.model.gemma import GEMMA2, GEMMA3, gemma_of_gguf
from kunserve.model.gguf.file import GgufFile
from kunserve.model.granite import with_granite_scales
from kunserve.model.moe_config import experts_from_gguf, inner_size_from_gguf
from kunserve.model.rope import (
    LinearRope,
    Llama3Rope,
    RopeScaling,
    YarnRope,
    reach_of,
    yarn_amplitude,
)
from kunserve.model.smollm3 import SMOLLM3, unturned_layers
from kunserve.model.spec import ModelSpec

GGUF_ARCHITECTURES = {
    "ernie4_5": "Ernie4_5ForCausalLM",
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "smollm3": SMOLLM3,
}
"""llama.cpp writes Mistral models as ``llama``, and Mixtral ones, too."""
PAIRED_ROPE = ("ernie4_5", "granite", "llama", "smollm3")
"""Whose files hold the two rotated values of a pair side by side."""
_GRANITE_SCALES = {
    "embedding": "embedding_scale",
    "residual": "residual_scale",
    "attention": "attention.scale",
    "logits": "logit_scale",
}
_OTHER_YARN = (
    "attn_factor",
    "yarn_log_multiplier",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
)
"""What YaRN is described by in some files, and is not read here."""


def spec_from_gguf(file: GgufFile, name: str, dtype: str) -> ModelSpec:
    """The shape that the metadata and the tensors present describe."""
    kind = file.get("general.architecture", str)
    if kind not in GGUF_ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: GGUF architecture {kind!r} is not supported; "
            f"supported are {', '.join(GGUF_ARCHITECTURES)}"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFiles(f"{file.path}: tensor 'token_embd.weight' is missing")
    if len(embedding.shape) != 2 or embedding.shape[0] == 0:
        raise ModelFiles(f"{file.path}: 'token_embd.weight' has shape {embedding.shape}")
    num_heads = file.count(f"{kind}.attention.head_count")
    hidden_size = file.count(f"{kind}.embedding_length")
    head_dim = file.count(f"{kind}.attention.key_length", hidden_size // num_heads)
    _refuse_unsupported(file, kind, head_dim)
    rope_scaling = _rope_scaling(file, kind)
    max_position = reach_of(rope_scaling, file.count(f"{kind}.context_length"))
    window = file.get(f"{kind}.attention.sliding_window", int, 0)
    if window < 0:
        raise ModelFiles(f"{file.path}: a sliding window of {window} tokens")
    experts = experts_from_gguf(file, kind)
    is_mixtral = kind == "llama" and experts is not None
    spec = ModelSpec(
        name=name,
        architecture="MixtralForCausalLM" if is_mixtral else GGUF_ARCHITECTURES[kind],
        num_layers=file.count(f"{kind}.block_count"),
        hidden_size=hidden_size,
        intermediate_size=inner_size_from_gguf(file, kind),
        num_heads=num_heads,
        num_kv_heads=file.count(f"{kind}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        max_position=max_position,
        rope_theta=file.number(f"{kind}.rope.freq_base", 10000.0),
        rms_eps=file.number(f"{kind}.attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        rope_scaling=rope_scaling,
        # 0 is no window, as in llama.cpp.
        sliding_window=window if 0 < window < max_position else None,
        dtype=dtype,
        has_fused_projections=kind == "phi3",
        experts=experts,
        has_whole_qk_norm=kind == "olmoe",
    )
    if kind == "granite":
        scales = {name: file.number(f"granite.{key}", 1.0) for name, key in _GRANITE_SCALES.items()}
        spec = with_granite_scales(spec, **scales)
    if kind == "smollm3":
        spec = dataclasses.replace(spec, unturned_layers=unturned_layers(spec.num_layers))
    if kind in ("gemma2", "gemma3"):
        spec = gemma_of_gguf(file, kind, spec)
    if num_heads % spec.num_kv_heads:
        raise ModelFiles(f"{file.path}: {num_heads} heads cannot share {spec.num_kv_heads}")
    return _with_rope_factors(file, spec)


def _refuse_unsupported(file: GgufFile, kind: str, head_dim: int) -> None:
    """Raise UnsupportedModel for what would load and answer plausibly wrong."""
    rotated = file.get(f"{kind}.rope.dimension_count", int, head_dim)
    if rotated != head_dim:
        raise UnsupportedModel(
            f"{file.path}: partial rotary embedding ({rotated} of {head_dim}) is not supported"
        )
    value_dim = file.get(f"{kind}.attention.value_length", int, head_dim)
    if value_dim != head_dim:
        raise UnsupportedModel(
            f"{file.path}: values of {value_dim} and keys of {head_dim} per head are not supported"
        )


def _rope_scaling(file: GgufFile, kind: str) -> RopeScaling | None:
    prefix = f"{kind}.rope.scaling"
    scaling = file.get(f"{prefix}.type", str, "linear")  # llama.cpp's default too
    if scaling not in ("none", "linear", "yarn") or "rope_factors_long.weight" in file.tensors:
        raise UnsupportedModel(f"{file.path}: rope scaling {scaling!r} is not supported")
    if scaling == "yarn":
        for key in _OTHER_YARN:
            if file.get(f"{prefix}.{key}", float, 0.0):
                raise UnsupportedModel(
                    f"{file.path}: yarn rope scaling with {key} is not supported"
                )
        trained = file.count(f"{kind}.context_length")
        factor = file.number(f"{prefix}.factor")
        original = file.count(f"{prefix}.original_context_length", trained)
        return YarnRope(factor, original, yarn_amplitude(factor))
    # The second is the key of old files. 0 stands for no factor.
    for key in (f"{prefix}.factor", f"{kind}.rope.scale_linear"):
        factor = file.get(key, float, 1.0)
        if scaling == "linear" and factor not in (0.0, 1.0):
            return LinearRope(file.number(key))
    return None


def eos_ids_from_gguf(file: GgufFile) -> tuple[int, ...]:
    """Every token that ends a reply: end of sequence, of turn, of message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    values = [file.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    return tuple(dict.fromkeys(value for value in values if isinstance(value, int)))


def _with_rope_factors(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Recover Llama 3's rope scaling, which GGUF stores as one divisor per frequency."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return spec
    count = spec.head_dim // 2
    if tensor.shape != (count,) or tensor.quant_type != 0:
        raise ModelFiles(f"{file.path}: 'rope_freqs.weight' is not {count} floats")
    if tensor.offset + 4 * count > file.num_bytes:
        raise ModelFiles(f"{file.path}: truncated inside tensor 'rope_freqs.weight'")
    with file.path.open("rb") as data:
        data.seek(tensor.offset)
        divisors = struct.unpack(f"<{count}f", data.read(4 * count))
    if not all(0 < divisor < math.inf for divisor in divisors):
        raise ModelFiles(f"{file.path}: 'rope_freqs.weight' holds no frequencies' divisors")
    scaling = Llama3Rope(round(max(divisors), 3), 1.0, 4.0, 8192)
    expected = _llama3_divisors(spec, scaling)
    if any(abs(a - b) > 1e-3 * b for a, b in zip(divisors, expected, strict=True)):
        raise UnsupportedModel(f"{file.path}: its rope frequencies are not Llama 3's")
    return dataclasses.replace(spec, rope_scaling=scaling)


def _llama3_divisors(spec: ModelSpec, scaling: Llama3Rope) -> list[float]:
    factor, low, high = scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_max_position
    divisors = []
    for index in range(spec.head_dim // 2):
        wavelength = 2 * math.pi * spec.rope_theta ** (2 * index / spec.head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
