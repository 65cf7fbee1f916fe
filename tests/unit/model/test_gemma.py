"""Gemma's configurations as they are published, and those that must be refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kunserve.core.errors import ModelFiles, UnsupportedModel
from kunserve.model.config import read_spec
from kunserve.model.rope import LinearRope
from kunserve.model.source import ModelSource
from kunserve.model.spec import ModelSpec

GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 128,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}
NEWER = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}


@pytest.fixture
def read(tmp_path: Path):
    def from_values(values: object, dtype: str = "bfloat16") -> ModelSpec:
        (tmp_path / "config.json").write_text(json.dumps(values))
        return read_spec(ModelSource("m", tmp_path, "dummy"), dtype)

    return from_values


def text(**changes: object) -> dict[str, Any]:
    """Gemma 3 with other values in its text part."""
    return {**GEMMA3, "text_config": {**GEMMA3["text_config"], **changes}}


def test_gemma_2_of_27b(read) -> None:
    spec = read(GEMMA2)
    assert (spec.score_cap, spec.logit_cap) == (50.0, 30.0)
    assert spec.attention_scale == pytest.approx(math.sqrt(128 / 144))
    assert spec.embedding_scale == torch.tensor(4608**0.5).bfloat16().item()
    assert read(GEMMA2, "float32").embedding_scale == torch.tensor(4608**0.5).item()
    assert read(GEMMA2, "float16").embedding_scale == torch.tensor(4608**0.5).half().item()
    assert [spec.window_of(layer) for layer in range(4)] == [4096, None, 4096, None]
    assert spec.tied_embeddings and spec.has_output_norms and not spec.qk_norm
    assert not any(spec.rope_of(layer) for layer in range(46))
    assert read({**GEMMA2, "final_logit_softcapping": None}).logit_cap is None
    assert spec.unseen_share(8192) == 0.25 and spec.unseen_share(4096) == 0


def test_gemma_3_of_4b_from_what_little_its_file_says(read) -> None:
    spec = read(GEMMA3)
    assert spec.architecture == "Gemma3ForCausalLM" and spec.qk_norm
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 4, 256)
    assert (spec.vocab_size, spec.max_position, spec.rope_theta) == (262208, 131072, 1e6)
    assert spec.rope_scaling == LinearRope(8.0) and spec.local_rope_theta == 1e4
    assert spec.global_layers == (5, 11, 17, 23, 29) and spec.sliding_window == 1024
    assert spec.rope_of(0) and not spec.rope_of(5)
    assert spec.attention_scale == 1.0 and spec.score_cap is None
    assert read(text(sliding_window_pattern=2)).global_layers == tuple(range(1, 34, 2))


def test_a_newer_file_says_the_same_in_other_words(read) -> None:
    spec = read(text(rope_scaling=None, rope_parameters=NEWER))
    assert spec.rope_scaling == LinearRope(4.0) and spec.rope_theta == 5e5
    assert spec.local_rope_theta == 2e4
    kinds = ["full_attention", *["sliding_attention"] * 33]
    assert read(text(layer_types=kinds)).global_layers == (0,)
    # Heads are turned by kind of layer, even if nobody gets beyond the window.
    assert read(text(sliding_window=1 << 20)).rope_of(0)


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        (text(hidden_activation="gelu"), UnsupportedModel, "activation 'gelu'"),
        (text(use_bidirectional_attention=True), UnsupportedModel, "later tokens"),
        (text(sliding_window=None), UnsupportedModel, "'sliding_window' is None"),
        (text(layer_types=["full_attention"]), ModelFiles, "does not name 34 layers"),
        (text(layer_types=["chunked"] * 34), UnsupportedModel, "a layer of 'chunked'"),
        (text(sliding_window_pattern=0), ModelFiles, "'sliding_window_pattern' is 0"),
        (text(query_pre_attn_scalar=-1), ModelFiles, "'query_pre_attn_scalar' is -1"),
        (text(rope_parameters={"full_attention": 3}), ModelFiles, "'full_attention' is not an"),
        (
            text(rope_parameters={"sliding_attention": {"rope_type": "yarn"}}),
            UnsupportedModel,
            "rope scaling of layers with a window",
        ),
        ({**GEMMA3, "text_config": 3}, ModelFiles, "'text_config' is not an object"),
    ],
)
def test_refused(read, values: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        read(values)


def gguf_spec(path: Path, kind: str, num_layers: int, **more: Any) -> ModelSpec:
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(8192)
    writer.add_embedding_length(5376)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(64)
    writer.add_head_count(32)
    writer.add_head_count_kv(16)
    writer.add_key_length(128)
    writer.add_layer_norm_rms_eps(1e-6)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tensor("token_embd.weight", np.zeros((10, 5376), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_spec(ModelSource("m", path, "gguf"), "bfloat16")


def test_gguf_says_less_and_llama_cpp_knows_the_rest(tmp_path: Path) -> None:
    big = gguf_spec(tmp_path / "a.gguf", "gemma3", 62, sliding_window=1024)
    assert big.attention_scale == pytest.approx(math.sqrt(128 / 168))
    assert big.global_layers == tuple(range(5, 62, 6)) and big.local_rope_theta == 1e4
    assert gguf_spec(tmp_path / "b.gguf", "gemma3", 34, sliding_window=9).attention_scale == 1.0
    whole = gguf_spec(tmp_path / "c.gguf", "gemma3", 34)
    assert whole.sliding_window is None and not whole.rope_of(0)
    second = gguf_spec(tmp_path / "d.gguf", "gemma2", 4, final_logit_softcapping=7.0)
    assert (second.score_cap, second.logit_cap) == (50.0, 7.0)
    assert second.sliding_window == 4096 and second.global_layers == (1, 3)
    odd = gguf_spec(tmp_path / "e.gguf", "gemma2", 3, sliding_window_pattern=[False, True, True])
    assert odd.global_layers == (0,)
    with pytest.raises(ModelFiles, match="pattern of windows"):
        gguf_spec(tmp_path / "f.gguf", "gemma2", 3, sliding_window_pattern=[True])
