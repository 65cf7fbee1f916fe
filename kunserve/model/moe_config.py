"""Which experts a model has, from ``config.json`` or GGUF metadata."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from kunserve.core.errors import ModelFiles, UnsupportedModel
from kunserve.model.experts import Experts
from kunserve.model.gguf.file import GgufFile

_SOFTMAX = 1
"""GGUF's number of the function that makes probabilities of a router's logits."""
_GGUF_NORMALISED = {"llama": True, "olmoe": False, "qwen2moe": False, "qwen3moe": True}
"""Whether weights are normalised: llama.cpp has it in the code of each architecture."""


class HfValues(Protocol):
    """A ``config.json`` whose values are checked as they are read."""

    path: Path
    values: dict[str, Any]

    def integer(self, key: str, default: Any = ...) -> int:
        """A positive integer."""
        ...

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        ...


def experts_from_hf(config: HfValues, architecture: str) -> Experts | None:
    """The experts of every layer; None for an architecture without any."""
    match architecture:
        case "MixtralForCausalLM":
            return _experts(config, "num_local_experts", normalised=True)
        case "OlmoeForCausalLM":
            _refuse(config, "clip_qkv", (None,))
        case "Qwen2MoeForCausalLM" | "Qwen3MoeForCausalLM":
            _refuse(config, "use_sliding_window", (None, False))
            # Layers of two shapes would be layers of two sizes in memory.
            _refuse(config, "decoder_sparse_step", (None, 1))
            _refuse(config, "mlp_only_layers", (None, []))
        case _:
            return None
    experts = _experts(config, "num_experts", normalised=config.flag("norm_topk_prob"))
    if architecture != "Qwen2MoeForCausalLM":
        return experts
    return replace(experts, shared_size=config.integer("shared_expert_intermediate_size"))


def inner_size_from_hf(config: HfValues, architecture: str) -> int:
    """Inner width of the MLP, or of each expert."""
    is_apart = architecture in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
    return config.integer("moe_intermediate_size" if is_apart else "intermediate_size")


def experts_from_gguf(file: GgufFile, kind: str) -> Experts | None:
    """The experts of every layer of a file of architecture ``kind``; None if it has none."""
    is_sparse = file.get(f"{kind}.expert_count", int, 0) != 0
    if kind not in _GGUF_NORMALISED:
        if is_sparse:
            raise UnsupportedModel(f"{file.path}: experts in {kind!r} models are not supported")
        return None
    if kind == "llama" and not is_sparse:
        return None
    for key, known in (
        ("expert_gating_func", (0, _SOFTMAX)),
        ("expert_shared_count", (0,)),
        ("expert_group_count", (0, 1)),
        ("leading_dense_block_count", (0,)),
    ):
        value = file.get(f"{kind}.{key}", int, 0)
        if value not in known:
            raise UnsupportedModel(f"{file.path}: experts with {key} {value} are not supported")
    scale = file.get(f"{kind}.expert_weights_scale", float, 0.0)
    if scale not in (0.0, 1.0):
        raise UnsupportedModel(f"{file.path}: expert_weights_scale {scale:g} is not supported")
    normalised = file.get(f"{kind}.expert_weights_norm", bool, _GGUF_NORMALISED[kind])
    experts = _checked(
        file.path,
        file.count(f"{kind}.expert_count"),
        file.count(f"{kind}.expert_used_count"),
        normalised,
    )
    if kind != "qwen2moe":
        return experts
    return replace(experts, shared_size=file.count(f"{kind}.expert_shared_feed_forward_length"))


def inner_size_from_gguf(file: GgufFile, kind: str) -> int:
    """Inner width of the MLP, or of each expert."""
    key = f"{kind}.expert_feed_forward_length"
    return file.count(key if key in file.metadata else f"{kind}.feed_forward_length")


def _experts(config: HfValues, key: str, *, normalised: bool) -> Experts:
    # transformers 5 may write either name.
    other = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}[key]
    is_renamed = config.values.get(key) is None and config.values.get(other) is not None
    number = config.integer(other if is_renamed else key)
    return _checked(config.path, number, config.integer("num_experts_per_tok"), normalised)


def _refuse(config: HfValues, key: str, known: tuple[object, ...]) -> None:
    value = config.values.get(key)
    if value not in known:
        raise UnsupportedModel(f"{config.path}: {key!r} {value!r} is not supported")


def _checked(path: Path, number: int, per_token: int, normalised: bool) -> Experts:
    if per_token > number:
        raise ModelFiles(f"{path}: {per_token} experts for each token, but there are {number}")
    return Experts(number, per_token, normalised)
