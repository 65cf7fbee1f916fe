"""A model's tensors as the decoders keep them, and their addresses as C reads them."""

import ctypes
from dataclasses import dataclass

import torch

from kunserve.engine.cpu.kernels.library import LAYER_FIELDS, CLayer
from kunserve.engine.cpu.kernels.ops import Matrix
from kunserve.engine.cpu.kernels.packed import PackedMatrix
from kunserve.engine.cpu.kernels.panels import PANEL_FORMAT, PanelMatrix

__all__ = ["LayerWeights", "ModelWeights", "as_c"]


@dataclass(slots=True)
class LayerWeights:
    """One layer's tensors, contiguous views in the model's dtype; matrices in panels, or packed."""

    input_norm: torch.Tensor
    """[hidden]."""
    qkv: Matrix
    """[q + 2 kv, hidden], rows of q, then k, then v."""
    o: Matrix
    """[hidden, q]."""
    post_norm: torch.Tensor
    """[hidden]."""
    gate_up: Matrix = None
    """[2 * intermediate, hidden], rows of gate, then up; None where experts are in its place."""
    down: Matrix = None
    """[hidden, intermediate]."""
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    """[head_dim] (Qwen3), or as wide as all heads (OLMoE)."""
    k_norm: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    router: torch.Tensor | None = None
    """[experts, hidden]."""
    experts_gate_up: Matrix = None
    """[experts * 2 * intermediate, hidden], each expert's as ``gate_up``."""
    experts_down: Matrix = None
    """[experts * hidden, intermediate]."""
    shared_gate_up: Matrix = None
    """[2 * shared, hidden], as ``gate_up``; the router's last row is its weight's."""
    shared_down: Matrix = None
    """[hidden, shared]."""
    attention_out_norm: torch.Tensor | None = None
    """[hidden], of what attention adds (Gemma)."""
    mlp_out_norm: torch.Tensor | None = None


@dataclass(slots=True)
class ModelWeights:
    """All tensors of a model."""

    embedding: Matrix
    """[vocab, hidden]."""
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    """[hidden]."""
    head: Matrix
    """[vocab, hidden]; the embedding itself when tied."""


def as_c(layer: LayerWeights) -> CLayer:
    """The addresses of a layer's tensors."""
    pointers = CLayer()
    for name in LAYER_FIELDS:
        tensor = getattr(layer, name)
        if isinstance(tensor, PanelMatrix):
            assert tensor.data.is_contiguous(), (name, tensor.shape)
            setattr(pointers, name, tensor.data.data_ptr())
            if name == "qkv":
                pointers.qkv_formats[:] = (PANEL_FORMAT,) * 3
            else:
                format_of = "shared" if name.startswith("shared") else name
                setattr(pointers, f"{format_of}_format", PANEL_FORMAT)
        elif isinstance(tensor, PackedMatrix):
            setattr(pointers, name, tensor.data.data_ptr())
            if name == "qkv":
                # One run where files hold one tensor: no panel has rows of two of them anyway.
                pointers.qkv_formats[:] = tensor.formats * (3 // len(tensor.formats))
            else:
                (format_number,) = set(tensor.formats)
                setattr(pointers, f"{name}_format", format_number)
        elif tensor is not None:
            assert tensor.is_contiguous(), (name, tensor.shape, ctypes.sizeof(ctypes.c_void_p))
            setattr(pointers, name, tensor.data_ptr())
    return pointers
