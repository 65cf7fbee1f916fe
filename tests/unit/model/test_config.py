import json
import math
from pathlib import Path
from typing import Any

import pytest

from kunserve.core.errors import ModelFiles, UnsupportedModel
from kunserve.model.config import read_eos_ids, read_spec
from kunserve.model.rope import LinearRope, Llama3Rope, YarnRope
from kunserve.model.source import ModelSource, resolve_model
from kunserve.model.spec import ModelSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}


@pytest.fixture
def read(tmp_path: Path):
    def from_values(values: object, dtype: str = "bfloat16") -> ModelSpec:
        text = values if isinstance(values, str) else json.dumps(values)
        (tmp_path / "config.json").write_text(text)
        return read_spec(ModelSource("m", tmp_path, "dummy"), dtype)

    return from_values


def test_a_plain_llama(read) -> None:
    spec = read(LLAMA)
    assert (spec.num_layers, spec.head_dim, spec.num_kv_heads, spec.rope_theta) == (4, 16, 2, 1e4)
    assert not (spec.attention_bias or spec.output_bias or spec.mlp_bias or spec.qk_norm)
    assert spec.rope_scaling is None and spec.sliding_window is None and not spec.tied_embeddings


def test_a_rotary_factor_of_null_or_one_is_the_whole_head(read) -> None:
    for whole in (None, 1, 1.0):
        named = {"partial_rotary_factor": whole}
        assert read({**LLAMA, **named, "rope_parameters": named}) == read(LLAMA)


def test_biases_and_norms_by_architecture(read) -> None:
    biased = read({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert biased.attention_bias and biased.output_bias and biased.mlp_bias
    qwen2 = read(QWEN2)
    assert qwen2.attention_bias and not qwen2.output_bias
    qwen3 = read({**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 32})
    assert qwen3.qk_norm and not qwen3.attention_bias and qwen3.q_size == 128


def test_rope_as_old_and_new_versions_write_it(read) -> None:
    old = read({**LLAMA, "rope_theta": 5e5, "rope_scaling": LLAMA3})
    new = read({**LLAMA, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}})
    assert old == new
    assert old.rope_scaling == Llama3Rope(32.0, 1.0, 4.0, 8192) and old.rope_theta == 5e5
    with pytest.raises(UnsupportedModel, match="'longrope'"):
        read({**LLAMA, "rope_scaling": {"type": "longrope", "factor": 2}})
    with pytest.raises(ModelFiles, match="'factor' is missing"):
        read({**LLAMA, "rope_scaling": {"rope_type": "llama3"}})


def test_rope_that_reaches_further_than_the_training_did(read) -> None:
    """The longest context is what the scaling is for, as in vLLM."""
    linear = read({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert linear.rope_scaling == LinearRope(4.0) and linear.max_position == 4 * 512
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    spec = read({**LLAMA, "rope_scaling": yarn})
    assert spec.max_position == 1024
    assert spec.rope_scaling == YarnRope(4.0, 256, pytest.approx(1.1386, abs=1e-4))
    assert read({**LLAMA, "rope_scaling": {**yarn, "factor": 1.5}}).max_position == 512
    named = read({**LLAMA, "rope_scaling": {**yarn, "attention_factor": 0.9, "beta_fast": 16}})
    assert named.rope_scaling == YarnRope(4.0, 256, 0.9, 16.0)
    twice = read({**LLAMA, "rope_scaling": {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}})
    assert twice.rope_scaling == YarnRope(4.0, 256, 1.0)
    with pytest.raises(UnsupportedModel, match="attn_temperature"):
        read({**LLAMA, "rope_scaling": {**yarn, "attn_temperature": 2.0}})


def test_granite_is_a_llama_with_factors(read) -> None:
    factors = {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.25,
        "attention_multiplier": 0.125,
        "logits_scaling": 8.0,
    }
    spec = read({**LLAMA, "architectures": ["GraniteForCausalLM"], "rms_norm_eps": 1e-5, **factors})
    assert spec.embedding_scale == 48.0 and spec.logit_scale == 0.125
    assert spec.rms_eps == pytest.approx(1.6e-4) and spec.attention_scale == 0.5
    with pytest.raises(ModelFiles, match="'residual_multiplier' is 0"):
        read({**LLAMA, "architectures": ["GraniteForCausalLM"], "residual_multiplier": 0})


def test_sliding_windows(read) -> None:
    assert read({**MISTRAL, "sliding_window": 100}).sliding_window == 100
    assert read({**MISTRAL, "sliding_window": None}).sliding_window is None
    assert read({**MISTRAL, "max_position_embeddings": 9000}).sliding_window == 4096
    assert read({**MISTRAL, "sliding_window": 512}).sliding_window is None
    assert read({**MISTRAL, "sliding_window": 0}).sliding_window is None
    assert read({**QWEN2, "sliding_window": 100}).sliding_window is None
    windowed = {**QWEN2, "sliding_window": 100, "use_sliding_window": True}
    assert read(windowed).sliding_window is None  # its first windowed layer is the 28th
    assert read({**windowed, "max_window_layers": 0}).sliding_window == 100
    some = read({**windowed, "max_window_layers": 2})
    assert [some.window_of(layer) for layer in range(4)] == [None, None, 100, 100]
    assert some.unseen_share(400) == 0.5 * 0.75


def test_layers_that_know_no_positions(read) -> None:
    smollm3 = {**LLAMA, "architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 8}
    spec = read(smollm3)
    assert spec.unturned_layers == (3, 7) and spec.tied_embeddings and spec.rope_theta == 2e6
    assert [spec.rope_of(layer) for layer in (2, 3)] == [0, 1]
    assert read({**smollm3, "no_rope_layer_interval": 3}).unturned_layers == (2, 5)
    assert read({**smollm3, "no_rope_layers": [0, 1] * 4}).unturned_layers == (0, 2, 4, 6)
    for wrong in ([0, 1], "all", [2] * 8):
        with pytest.raises(ModelFiles, match="'no_rope_layers' does not say 0 or 1 for 8 layers"):
            read({**smollm3, "no_rope_layers": wrong})
    with pytest.raises(UnsupportedModel, match="window of SmolLM3"):
        read({**smollm3, "use_sliding_window": True})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**LLAMA, "architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM is not supported"),
        ({**LLAMA, "hidden_act": "gelu"}, "'gelu'"),
        ({**LLAMA, "quantization_config": {"quant_method": "awq"}}, "awq"),
        ({**LLAMA, "quantization_config": "fp8"}, "fp8"),
        (
            {**LLAMA, "quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 64]}},
            r"blocks of \[1, 64\]",
        ),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial rotary"),
        ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0}}, "partial rotary"),
        ({**LLAMA, "rope_parameters": {"full_attention": {"factor": 2}}}, "full_attention"),
        ({**LLAMA, "rope_scaling": {"mrope_section": [1, 2]}}, "mrope_section"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(read, values, message) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read(values)


def test_a_refusal_lists_what_is_supported(read) -> None:
    with pytest.raises(UnsupportedModel, match="Llama.*Mistral.*Qwen2.*Qwen3"):
        read({**LLAMA, "architectures": ["MambaForCausalLM"]})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ({}, "'architectures' is missing"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "'hidden_size' is missing"),
        ({**LLAMA, "vocab_size": "many"}, "'vocab_size' is 'many'"),
        ({**LLAMA, "num_hidden_layers": 0}, "not a positive integer"),
        ({**LLAMA, "num_key_value_heads": 3}, "cannot share"),
        ("[" * 100_000, "not valid JSON"),
        ({**LLAMA, "rope_theta": math.nan}, "'rope_theta' is nan"),
        ({**LLAMA, "rope_theta": 10**400}, "not a positive number"),
        ({**LLAMA, "rope_parameters": {"rope_theta": -1.0}}, "'rope_theta' is -1"),
        ({**LLAMA, "rope_parameters": [1]}, "'rope_parameters' is not an object"),
        ({**LLAMA, "rms_norm_eps": math.inf}, "'rms_norm_eps' is inf"),
        ({**LLAMA, "rope_scaling": {**LLAMA3, "factor": 0}}, "'factor' is 0"),
        ({**LLAMA, "rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "no range from 4 to 4"),
        ({**LLAMA, "tie_word_embeddings": "yes"}, "neither true nor false"),
        ({**MISTRAL, "sliding_window": "4096"}, "'sliding_window' is '4096'"),
        ({**MISTRAL, "sliding_window": 10.5}, "'sliding_window' is 10.5"),
        ({**MISTRAL, "sliding_window": -1}, "'sliding_window' is -1"),
        (
            {**QWEN2, "use_sliding_window": True, "max_window_layers": "2"},
            "'max_window_layers' is '2'",
        ),
    ],
)
def test_a_malformed_config_names_the_file_and_the_key(read, values, message) -> None:
    with pytest.raises(ModelFiles, match=rf"config\.json.*{message}"):
        read(values)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelFiles, match=r"config\.json: cannot be read"):
        read_spec(ModelSource("m", tmp_path, "dummy"), "bfloat16")


def test_dtypes(read) -> None:
    assert read(LLAMA, "float32").dtype_bytes == 4
    assert read(LLAMA, "float16").dtype_bytes == 2, "a GPU's; a CPU refuses it when it opens"


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    source = ModelSource("m", tmp_path, "dummy")
    assert read_eos_ids(source) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert read_eos_ids(source) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 8, 9]}')
    assert read_eos_ids(source) == (9, 8)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_eos_ids(source) == (7,)


def test_the_built_in_model() -> None:
    source = resolve_model("smollm2-135m")
    spec = read_spec(source, "bfloat16")
    assert (spec.num_layers, spec.hidden_size, spec.num_kv_heads, spec.vocab_size) == (
        30,
        576,
        3,
        49152,
    )
    assert spec.tied_embeddings and spec.max_position == 8192
    assert read_eos_ids(source) == (2,)
