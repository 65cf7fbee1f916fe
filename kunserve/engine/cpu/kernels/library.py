"""The compiled kernels as Python sees them: the structs of csrc/api.h and the loaded library."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from typing import Any

import numpy.typing as npt
import torch

from kunserve.core.errors import ConfigError
from kunserve.engine.cpu.kernels.build import find_or_build

SUFFIX = {torch.bfloat16: "bf16", torch.float32: "f32"}

LAYER_FIELDS = (
    "input_norm",
    "qkv",
    "qkv_bias",
    "q_norm",
    "k_norm",
    "o",
    "o_bias",
    "post_norm",
    "gate_up",
    "gate_up_bias",
    "down",
    "down_bias",
    "router",
    "experts_gate_up",
    "experts_down",
    "shared_gate_up",
    "shared_down",
    "attention_out_norm",
    "mlp_out_norm",
)


class CLayer(ctypes.Structure):
    """``kun_layer``: addresses of one layer's tensors, None where there is none."""

    _fields_ = [
        *((name, c_void_p) for name in LAYER_FIELDS),
        ("qkv_formats", c_int32 * 3),
        ("o_format", c_int32),
        ("gate_up_format", c_int32),
        ("down_format", c_int32),
        ("experts_gate_up_format", c_int32),
        ("experts_down_format", c_int32),
        ("shared_format", c_int32),
        ("window", c_int32),
        ("rope", c_int32),
    ]


class CPacked(ctypes.Structure):
    """``kun_packed``: a matrix in packed panels."""

    _fields_ = [
        ("panels", c_void_p),
        ("runs", c_int32),
        ("formats", c_int32 * 3),
        ("rows", c_int32 * 3),
    ]


class CModel(ctypes.Structure):
    """``kun_model``: shapes, and where the KV array starts."""

    _fields_ = [
        ("unit_bytes", c_int64),
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("intermediate", c_int32),
        ("block_size", c_int32),
        ("window", c_int32),
        ("eps", c_float),
        ("score_cap", c_float),
        ("norm_offset", c_int32),
        ("gate", c_int32),
        ("kv", c_void_p),
        ("experts", c_int32),
        ("experts_per_token", c_int32),
        ("normalises_experts", c_int32),
        ("first_expert", c_int32),
        ("held_experts", c_int32),
        ("shared", c_int32),
        ("whole_qk_norm", c_int32),
        ("score_scale", c_float),
    ]


class CBatch(ctypes.Structure):
    """``kun_batch``: one step's tokens and tables."""

    _fields_ = [
        ("positions", c_void_p),
        ("tables", c_void_p),
        ("rows", c_void_p),
        ("q_starts", c_void_p),
        ("context_lens", c_void_p),
        ("rope", c_void_p * 2),
        ("num_tokens", c_int32),
        ("num_seqs", c_int32),
        ("max_blocks", c_int32),
        ("local_tables", c_void_p),
        ("kept", c_void_p),
        ("num_kept", c_int32),
    ]


class CRanks(ctypes.Structure):
    """``kun_ranks``: this process as one of several that compute a stage together."""

    _fields_ = [
        ("meeting", c_void_p),
        ("parts", c_void_p),
        ("patience_ns", c_int64),
        ("rank", c_int32),
        ("size", c_int32),
        ("lost", c_int32),
    ]


BUFFER_FIELDS = ("hidden", "normed", "qkv", "mixed", "gated", "rounded", "routing", "sums", "ranks")


class CBuffers(ctypes.Structure):
    """``kun_buffers``: the step's activations, and with whom they are computed."""

    _fields_ = [(name, c_void_p) for name in BUFFER_FIELDS]


class CEnds(ctypes.Structure):
    """``kun_ends``: a step's embedding and output head."""

    _fields_ = [
        ("embedding", c_void_p),
        ("embedding_rows", c_int64),
        ("embedding_panels", c_int64),
        ("row_bytes", c_int64),
        ("token_ids", c_void_p),
        ("sampled", c_void_p),
        ("num_sampled", c_int64),
        ("norm", c_void_p),
        ("head", c_void_p),
        ("head_panels", c_int64),
        ("packed", POINTER(CPacked)),
        ("vocab", c_int64),
        ("width", c_int64),
        ("first", c_int64),
        ("normed", c_void_p),
        ("rounded", c_void_p),
        ("logits", c_void_p),
        ("pairs", c_void_p),
        ("eps", c_float),
        ("norm_offset", c_int32),
    ]


_LINEAR = (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int32)
_TYPED = {
    "kun_linear": _LINEAR,
    "kun_panel_linear": (*_LINEAR, c_int64),
    "kun_packed_linear": (
        c_void_p,
        POINTER(CPacked),
        c_void_p,
        c_void_p,
        c_int64,
        c_int64,
        c_int64,
        c_int32,
        c_void_p,
    ),
    "kun_gather": (POINTER(CPacked), c_void_p, c_void_p, c_int64, c_int64),
    "kun_rank_sum": (POINTER(CRanks), c_void_p, c_int64, c_int64),
    "kun_rms_norm": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int32),
    "kun_place": (POINTER(CModel), POINTER(CLayer), POINTER(CBatch), POINTER(CBuffers), c_int64),
    "kun_experts": (POINTER(CModel), POINTER(CLayer), POINTER(CBuffers), c_int64),
    "kun_attend": (
        POINTER(CModel),
        POINTER(CBatch),
        c_void_p,
        c_int64,
        c_void_p,
        c_int64,
        c_void_p,
        c_int64,
        c_void_p,
        c_int64,
        c_int64,
    ),
    "kun_attention": (POINTER(CModel), POINTER(CBatch), c_void_p, c_void_p, c_int64, c_int64),
    "kun_stage": (
        POINTER(CModel),
        POINTER(CLayer),
        POINTER(CBatch),
        POINTER(CBuffers),
        c_int64,
        c_int64,
    ),
    "kun_head": (c_void_p, POINTER(CEnds)),
    "kun_whole": (
        POINTER(CModel),
        POINTER(CLayer),
        POINTER(CBatch),
        POINTER(CBuffers),
        c_int64,
        c_int64,
        POINTER(CEnds),
    ),
}


_is_loaded = False


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded kernels, compiled first if need be. Calls release the GIL.

    Raises ``ConfigError`` if they cannot be compiled, or if Linux refuses what they need.
    """
    global _is_loaded
    loaded = load(str(find_or_build()))
    _is_loaded = True
    return loaded


def is_loaded() -> bool:
    """Whether this process uses the kernels."""
    return _is_loaded


def load(path: str, is_other: bool = False) -> ctypes.CDLL:
    """The library at ``path`` with every signature declared.

    Another checkout's (``is_other``) may lack some.
    """
    loaded = ctypes.CDLL(path)

    def declare(name: str, arguments: Sequence[Any], result: Any = None) -> None:
        if not is_other or hasattr(loaded, name):
            function = getattr(loaded, name)
            function.argtypes, function.restype = arguments, result

    for name, arguments in _TYPED.items():
        for suffix in SUFFIX.values():
            declare(f"{name}_{suffix}", arguments, c_int32 if name == "kun_whole" else None)
    for name in ("meet", "tell", "lose"):
        declare(f"kun_ranks_{name}", (POINTER(CRanks),))
    declare("kun_ranks_wait", (POINTER(CRanks), c_int32, c_int64), c_int32)
    declare("kun_ranks_meeting_bytes", (), c_int64)
    declare("kun_argmax", (c_void_p, c_void_p, c_int64, c_int64))
    declare("kun_largest", (c_void_p, c_void_p, c_int64, c_int64, c_int64))
    pick = (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p)
    declare("kun_pick_rows", pick, c_int32)
    declare("kun_arranging_bytes", (c_int64, c_int64), c_int64)
    declare("kun_to_panels", (c_void_p, c_int64, c_int64, c_int64, c_int32, c_void_p))
    declare("kun_entry_bounds", (*(c_void_p,) * 3, *(c_int64,) * 3, c_void_p))
    declare("kun_set_threads", (c_int32,), c_int32)
    return loaded


def kernel(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    """The kernel ``name`` for elements of ``dtype``."""
    found: Callable[..., Any] = getattr(library(), f"{name}_{SUFFIX[dtype]}")
    return found


def address_of(array: npt.NDArray[Any]) -> int:
    """Where an array's elements lie. Behind a step, ``array.ctypes`` takes three times as long."""
    if not array.flags.writeable or not array.nbytes:
        return array.ctypes.data
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))


def set_num_threads(num_threads: int) -> None:
    """Threads per kernel call in this process, the caller's included; 1 keeps no worker alive."""
    if not library().kun_set_threads(num_threads):
        raise ConfigError(f"cannot run {num_threads} kernel threads")
