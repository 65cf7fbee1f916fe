"""Writes a tiny model as GGUF, the way llama.cpp's converter does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from kunserve.engine.weights.pieces import GGUF_ENDS, GGUF_LAYER, HF_ENDS, HF_LAYER


def _interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows: the two rotary halves alternate."""
    shape = weight.shape
    return (
        weight.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:])
        .swapaxes(1, 2)
        .reshape(shape)
    )


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    kind: str,
    quant: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    quantise: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Path:
    """Save ``model`` under the architecture ``kind``, its matrices as ``quant``.

    ``quantise`` does it where the ``gguf`` package cannot.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_rope_scaling(writer, rope)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind == "gemma3":
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
        writer.add_sliding_window_pattern([k != "full_attention" for k in config.layer_types])
    if kind == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if hasattr(config, "num_experts_per_tok"):
        number = getattr(config, "num_local_experts", None) or config.num_experts
        writer.add_expert_count(number)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "shared_expert_intermediate_size"):
        width = config.shared_expert_intermediate_size
        writer.add_expert_shared_feed_forward_length(width)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for name, tensor in _tensors(model, config.num_hidden_layers):
        values = tensor.detach().float().numpy()
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1.0)
        piece = name.split(".attn_")[-1].split(".")[0]
        if kind in ("llama", "granite", "smollm3") and ".attn_" in name and piece in heads:
            values = np.ascontiguousarray(_interleave(values, heads[piece]))
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            fits = values.shape[-1] % gguf.GGML_QUANT_SIZES[quant][0] == 0
            stored_as = quant if fits else gguf.GGMLQuantizationType.BF16
            raw = quantise(values) if quantise else gguf.quants.quantize(values, stored_as)
            writer.add_tensor(name, raw, raw_dtype=stored_as)
    if kind == "llama" and config.rope_parameters.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _rope_divisors(model))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_rope_scaling(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope.get("original_max_position_embeddings"):
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _tensors(model: transformers.PreTrainedModel, num_layers: int):
    state = model.state_dict()
    tied = model.config.tie_word_embeddings
    has_output_norms = "model.layers.0.pre_feedforward_layernorm.weight" in state
    for piece, hf_name in HF_ENDS.items():
        if not (tied and piece == "head"):
            yield GGUF_ENDS[piece], state[hf_name]
    for layer in range(num_layers):
        for piece, hf_name in HF_LAYER.items():
            if piece == ("post_norm" if has_output_norms else "attention_out_norm"):
                continue  # of one name in Hugging Face's files
            tensor = state.get(f"model.layers.{layer}.{hf_name}")
            if tensor is not None:
                # llama.cpp's converter takes the first dimension of a single row away.
                yield f"blk.{layer}.{GGUF_LAYER[piece]}", tensor.squeeze(0)
        experts = f"model.layers.{layer}.mlp.experts"
        if f"{experts}.down_proj" in state:
            gate, up = state[f"{experts}.gate_up_proj"].chunk(2, dim=1)
            parts = {"gate": gate, "up": up, "down": state[f"{experts}.down_proj"]}
            for name, tensor in parts.items():
                yield f"blk.{layer}.ffn_{name}_exps.weight", tensor.contiguous()


def _rope_divisors(model: transformers.PreTrainedModel) -> np.ndarray:
    config = model.config
    dim = config.head_dim
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, dim, 2).float() / dim)
    return (plain / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)
