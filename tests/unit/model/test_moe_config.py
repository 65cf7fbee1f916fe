"""Experts as ``config.json`` describes them."""

from typing import Any

import pytest

from kunserve.core.errors import ModelFiles, UnsupportedModel
from kunserve.model.experts import Experts
from tests.unit.model.test_config import LLAMA, read

__all__ = ["read"]

MIXTRAL: dict[str, Any] = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
OLMOE: dict[str, Any] = {
    **LLAMA,
    "architectures": ["OlmoeForCausalLM"],
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "clip_qkv": None,
}
QWEN2: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen2MoeForCausalLM"],
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 112,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}
QWEN3: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 32,
    "moe_intermediate_size": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "mlp_bias": True,
}


def test_experts_by_architecture(read) -> None:
    assert read(LLAMA).experts is None
    mixtral = read(MIXTRAL)
    assert mixtral.experts == Experts(8, 2, normalised=True) and not mixtral.qk_norm
    assert (mixtral.intermediate_size, mixtral.rope_theta, mixtral.sliding_window) == (
        96,
        1e6,
        None,
    )
    olmoe = read(OLMOE)
    assert olmoe.experts == Experts(64, 8, normalised=False)
    assert olmoe.qk_norm and olmoe.qk_norm_sizes == (64, 32)
    assert read({**OLMOE, "norm_topk_prob": True}).experts == Experts(64, 8, normalised=True)
    qwen2 = read(QWEN2)
    assert qwen2.experts == Experts(60, 4, normalised=False, shared_size=112)
    assert qwen2.attention_bias and not qwen2.output_bias and qwen2.intermediate_size == 48
    assert not read({**QWEN2, "qkv_bias": False}).attention_bias
    qwen3 = read(QWEN3)
    assert qwen3.experts == Experts(128, 8, normalised=True) and qwen3.intermediate_size == 48
    assert qwen3.qk_norm and qwen3.qk_norm_sizes == (32, 32) and not qwen3.mlp_bias


def test_either_name_of_the_number(read) -> None:
    renamed = {**QWEN3, "num_local_experts": 128}
    del renamed["num_experts"]
    assert read(renamed).experts == read(QWEN3).experts


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**QWEN3, "decoder_sparse_step": 2}, "'decoder_sparse_step' 2"),
        ({**QWEN3, "mlp_only_layers": [0]}, r"'mlp_only_layers' \[0\]"),
        ({**QWEN3, "use_sliding_window": True}, "'use_sliding_window' True"),
        ({**OLMOE, "clip_qkv": 8.0}, r"'clip_qkv' 8\.0"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(read, values, message) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**OLMOE, "num_experts_per_tok": 65}, "65 experts for each token, but there are 64"),
        ({**OLMOE, "num_experts": 0}, "'num_experts' is 0"),
        ({**MIXTRAL, "num_local_experts": None}, "'num_local_experts' is missing"),
        ({**MIXTRAL, "num_experts_per_tok": "2"}, "'num_experts_per_tok' is '2'"),
        ({**QWEN3, "norm_topk_prob": 1}, "neither true nor false"),
    ],
)
def test_a_malformed_config_names_the_file_and_the_key(read, values, message) -> None:
    with pytest.raises(ModelFiles, match=rf"config\.json.*{message}"):
        read(values)
