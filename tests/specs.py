"""Models and instances for tests: say what matters, the rest is small and plain."""

from dataclasses import replace
from typing import Any

from kunserve.core.ids import InstanceId
from kunserve.core.kv_blocks import KvRing
from kunserve.core.snapshots import InstanceSpec
from kunserve.model.spec import ModelSpec

_TINY = ModelSpec(
    name="tiny",
    architecture="LlamaForCausalLM",
    num_layers=4,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=160,
    max_position=512,
    rope_theta=1e4,
    rms_eps=1e-5,
    tied_embeddings=True,
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    rope_scaling=None,
    sliding_window=None,
    dtype="bfloat16",
)
SMOLLM2_135M = replace(
    _TINY,
    name="smollm2-135m",
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_position=8192,
    rope_theta=1e5,
)


def model_spec(**changes: Any) -> ModelSpec:
    """A tiny Llama."""
    return replace(_TINY, **changes)


def instance_spec(
    instance: int = 0,
    num_layers: int = 12,
    kv_units: int = 1200,
    *,
    block_size: int = 16,
    unit_bytes: int = 10,
    layer_bytes: int = 1000,
    granule_bytes: int = 10,
    memory_bytes: int | None = None,
    kv_ring: KvRing | None = None,
) -> InstanceSpec:
    """An instance whose memory is weights and KV and nothing else, unless told."""
    if memory_bytes is None:
        memory_bytes = num_layers * layer_bytes + kv_units * unit_bytes
    return InstanceSpec(
        instance_id=InstanceId(instance),
        num_layers=num_layers,
        block_size=block_size,
        unit_bytes=unit_bytes,
        layer_bytes=layer_bytes,
        memory_bytes=memory_bytes,
        kv_units=kv_units,
        granule_bytes=granule_bytes,
        kv_ring=kv_ring,
    )
