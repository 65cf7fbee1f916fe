"""Gemma 2 and 3: what their files leave out, and what they add to a Llama.

    h = sqrt(hidden) embed(t);  h += norm(attention(norm(h)));  h += norm(mlp(norm(h)))

* A norm multiplies by 1 + w, in float32, so files hold w. GGUF files hold 1 + w: the reader takes
  the 1 away, because a sum of 8 bits would have lost what w says.
* Most layers see a window of tokens only. Gemma 3 turns their heads by another rotary embedding.
* Scores are divided by the root of a number of their own; see ``model.granite``.
* Gemma 2 bends scores and logits by a tanh, so that none gets beyond a cap.
"""

import dataclasses
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kunserve.core.errors import ModelFiles, UnsupportedModel
from kunserve.model.gguf.file import GgufFile
from kunserve.model.spec import ModelSpec

GEMMA2, GEMMA3 = "Gemma2ForCausalLM", "Gemma3ForCausalLM"
_WITH_IMAGES = "Gemma3ForConditionalGeneration"
GEMMA_ARCHITECTURES = (GEMMA2, GEMMA3, _WITH_IMAGES)
_ACTIVATION = "gelu_pytorch_tanh"
_LOCAL_THETA = 10000.0
_PATTERNS = {GEMMA2: 2, GEMMA3: 6}
"""Every so many layers one sees all tokens."""
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "hidden_activation": _ACTIVATION,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
"""Of configurations in ``transformers``: published files name only what differs from them."""
_OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    GEMMA2: {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192,
        "vocab_size": 256000,
    },
    GEMMA3: {
        "max_position_embeddings": 131072,
        "rope_local_base_freq": _LOCAL_THETA,
        "rope_theta": 1e6,
        "vocab_size": 262208,
    },
}
_GGUF_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the models whose scores are not divided by the root of the head's size."""


def gemma_values(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """A Gemma's ``config.json`` with all that it means, as a Llama's would say it.

    Of a model with images the part that is text. Other models' are returned as they are.
    """
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in GEMMA_ARCHITECTURES:
        return values
    if name == _WITH_IMAGES:
        name, values = GEMMA3, _object(path, values, "text_config")
    values = {**_DEFAULTS, **_OWN_DEFAULTS[name], **values, "architectures": [name]}
    activation = values.pop("hidden_activation") or values.get("hidden_act")
    values.pop("hidden_act", None)
    if activation != _ACTIVATION:
        raise UnsupportedModel(f"{path}: activation {activation!r} is not supported")
    if values.get("use_bidirectional_attention"):
        raise UnsupportedModel(f"{path}: attention to later tokens is not supported")
    num_layers, pattern = values["num_hidden_layers"], _PATTERNS[name]
    if values.get("layer_types") is None and isinstance(num_layers, int):
        pattern = values.get("sliding_window_pattern", pattern)
        if not isinstance(pattern, int) or pattern <= 0:
            raise ModelFiles(f"{path}: 'sliding_window_pattern' is {pattern!r}, no number")
        values["layer_types"] = _kinds(num_layers, pattern)
    if not values["sliding_window"]:
        raise UnsupportedModel(f"{path}: 'sliding_window' is {values['sliding_window']!r}")
    if name == GEMMA3:
        _flatten_rope(path, values)
    return values


def _kinds(num_layers: int, pattern: int) -> list[str]:
    kinds = ("full_attention", "sliding_attention")
    return [kinds[(layer + 1) % pattern != 0] for layer in range(num_layers)]


def _flatten_rope(path: Path, values: dict[str, Any]) -> None:
    """Newer files describe both rotary embeddings in one object, older ones by two keys."""
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict) or not rope.keys() & {"full_attention", "sliding_attention"}:
        return
    local = _object(path, rope, "sliding_attention")
    if local.get("rope_type", "default") != "default":
        raise UnsupportedModel(f"{path}: rope scaling of layers with a window is not supported")
    values["rope_parameters"] = _object(path, rope, "full_attention")
    values["rope_local_base_freq"] = local.get("rope_theta", _LOCAL_THETA)


def _object(path: Path, values: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key) or {}
    if not isinstance(found, dict):
        raise ModelFiles(f"{path}: {key!r} is not an object")
    return found


def with_gemma(
    spec: ModelSpec,
    *,
    query_scalar: float,
    local_theta: float | None,
    score_cap: float | None,
    logit_cap: float | None,
    max_position: int,
) -> ModelSpec:
    """The model with what every Gemma has; ``spec`` has its windows already.

    ``max_position`` is what files say: with a scaled rotary embedding they say the scaled one.
    """
    return dataclasses.replace(
        spec,
        max_position=max_position,
        embedding_scale=_rounded(math.sqrt(spec.hidden_size), spec.dtype),
        attention_scale=math.sqrt(spec.head_dim / query_scalar),
        local_rope_theta=local_theta,
        score_cap=score_cap,
        logit_cap=logit_cap,
        has_gelu=True,
        has_offset_norms=True,
        has_output_norms=True,
    )


def _rounded(value: float, dtype: str) -> float:
    """As a tensor of the dtype would hold it."""
    if dtype == "float16":
        (found,) = struct.unpack("<e", struct.pack("<e", value))
        return float(found)
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if dtype == "bfloat16":
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    (found,) = struct.unpack("<f", struct.pack("<I", bits))
    return float(found)


def gemma_of_gguf(file: GgufFile, kind: str, spec: ModelSpec) -> ModelSpec:
    """The model with what llama.cpp knows of Gemmas beside the metadata.

    Files do not say what scores are divided by: that of 27B models differs, and llama.cpp tells
    them by their layers.
    """
    is_second = kind == "gemma2"
    window = file.get(f"{kind}.attention.sliding_window", int, 4096 if is_second else 0)
    pattern = file.metadata.get(f"{kind}.attention.sliding_window_pattern", 2 if is_second else 6)
    if isinstance(pattern, int) and pattern > 0:
        kinds = _kinds(spec.num_layers, pattern)
        seen = tuple(i for i, found in enumerate(kinds) if found == "full_attention")
    elif isinstance(pattern, list) and len(pattern) == spec.num_layers:
        seen = tuple(i for i, is_local in enumerate(pattern) if not is_local)
    else:
        raise ModelFiles(f"{file.path}: its pattern of windows is {pattern!r}, no number")
    theta = None if is_second else file.number(f"{kind}.rope.freq_base_swa", _LOCAL_THETA)
    is_27b = spec.num_layers == _GGUF_27B[kind]
    spec = dataclasses.replace(
        spec,
        sliding_window=window if window > 0 else None,
        global_layers=seen if window > 0 else (),
    )
    return with_gemma(
        spec,
        query_scalar=spec.hidden_size / spec.num_heads if is_27b else spec.head_dim,
        local_theta=theta,
        score_cap=_cap(file, f"{kind}.attn_logit_softcapping", 50.0 if is_second else 0.0),
        logit_cap=_cap(file, f"{kind}.final_logit_softcapping", 30.0 if is_second else 0.0),
        max_position=file.count(f"{kind}.context_length"),
    )


def _cap(file: GgufFile, key: str, default: float) -> float | None:
    """0 is none, as in llama.cpp."""
    value: float = file.get(key, float, default)
    return file.number(key, default) if value != 0 else None
