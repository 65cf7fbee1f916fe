"""What checkpoints store of each packed tensor, and under which names.

A packed tensor is one or more *pieces* stacked by rows: ``qkv`` is q, then k, then v.
"""

from typing import NamedTuple

from kunserve.model.spec import ModelSpec

PIECES_OF = {
    "qkv": ("q", "k", "v"),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    "gate_up": ("gate", "up"),
    "gate_up_bias": ("gate_bias", "up_bias"),
}
"""Fused tensors; every other one is a single piece of its own name, and so are these where
files hold them fused, too."""
EXPERT_PARTS = {"experts_gate_up": ("gate", "up"), "experts_down": ("down",)}
"""Of each expert, expert after expert, in a tensor that holds the matrices of all."""
EXPERT_PREFIX = "experts."
"""A piece ``experts.3.gate`` is the gate of expert 3; ``expert_pieces`` says where files have it.
"""

HF_ENDS = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
HF_LAYER = {
    "input_norm": "input_layernorm.weight",
    "qkv": "self_attn.qkv_proj.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "o_bias": "self_attn.o_proj.bias",
    "post_norm": "post_attention_layernorm.weight",
    "attention_out_norm": "post_attention_layernorm.weight",
    "inner_post_norm": "pre_feedforward_layernorm.weight",
    "mlp_out_norm": "post_feedforward_layernorm.weight",
    "gate_up": "mlp.gate_up_proj.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down": "mlp.down_proj.weight",
    "down_bias": "mlp.down_proj.bias",
    "router": "mlp.gate.weight",
    "shared_router": "mlp.shared_expert_gate.weight",
    "shared_gate": "mlp.shared_expert.gate_proj.weight",
    "shared_up": "mlp.shared_expert.up_proj.weight",
    "shared_down": "mlp.shared_expert.down_proj.weight",
}
GGUF_ENDS = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
}
GGUF_LAYER = {
    "input_norm": "attn_norm.weight",
    "qkv": "attn_qkv.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o": "attn_output.weight",
    "o_bias": "attn_output.bias",
    "post_norm": "ffn_norm.weight",
    "attention_out_norm": "post_attention_norm.weight",
    "inner_post_norm": "ffn_norm.weight",
    "mlp_out_norm": "post_ffw_norm.weight",
    "gate_up": "ffn_up.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down": "ffn_down.weight",
    "down_bias": "ffn_down.bias",
    "router": "ffn_gate_inp.weight",
    "shared_router": "ffn_gate_inp_shexp.weight",
    "shared_gate": "ffn_gate_shexp.weight",
    "shared_up": "ffn_up_shexp.weight",
    "shared_down": "ffn_down_shexp.weight",
}


class Piece(NamedTuple):
    """One stored tensor; ``layer`` is None for those outside the layers."""

    layer: int | None
    name: str

    @property
    def hf_name(self) -> str:
        """Its name in a Hugging Face checkpoint."""
        if self.layer is None:
            return HF_ENDS[self.name]
        return f"model.layers.{self.layer}.{HF_LAYER[self.name]}"

    @property
    def gguf_name(self) -> str:
        """Its name in a GGUF file."""
        if self.layer is None:
            return GGUF_ENDS[self.name]
        return f"blk.{self.layer}.{GGUF_LAYER[self.name]}"


def rows_of(field: str, num_rows: int, spec: ModelSpec) -> list[tuple[str, int, int]]:
    """(piece, first row, end row) of each piece of a packed tensor with ``num_rows`` rows."""
    if field in EXPERT_PARTS:
        return _expert_rows(field, spec)
    if field == "shared_gate_up":
        half = num_rows // 2
        return [("shared_gate", 0, half), ("shared_up", half, num_rows)]
    if field == "router" and spec.experts is not None and num_rows > spec.experts.number:
        end = spec.experts.number
        return [("router", 0, end), ("shared_router", end, num_rows)]
    if spec.has_fused_projections:
        return [(field, 0, num_rows)]
    if spec.has_output_norms and field == "post_norm":
        return [("inner_post_norm", 0, num_rows)]
    if field in ("qkv", "qkv_bias"):
        sizes = [spec.q_size, spec.kv_size, spec.kv_size]
    elif field in ("gate_up", "gate_up_bias"):
        sizes = [spec.intermediate_size, spec.intermediate_size]
    else:
        sizes = [num_rows]
    assert sum(sizes) == num_rows, (field, sizes, num_rows)
    found = []
    first = 0
    for piece, size in zip(PIECES_OF.get(field, (field,)), sizes, strict=True):
        found.append((piece, first, first + size))
        first += size
    return found


def _expert_rows(field: str, spec: ModelSpec) -> list[tuple[str, int, int]]:
    assert spec.experts is not None
    size = spec.hidden_size if field == "experts_down" else spec.intermediate_size
    names = [
        f"{EXPERT_PREFIX}{expert}.{part}"
        for expert in range(spec.experts.held)
        for part in EXPERT_PARTS[field]
    ]
    return [(name, i * size, (i + 1) * size) for i, name in enumerate(names)]
