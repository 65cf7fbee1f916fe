"""GGUF headers that must be refused by name, made with the gguf package's own writer."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kunserve.core.errors import ModelFiles, UnsupportedModel
from kunserve.model.config import read_spec
from kunserve.model.experts import Experts
from kunserve.model.gguf.file import GgufFile
from kunserve.model.rope import LinearRope
from kunserve.model.source import ModelSource
from kunserve.model.spec import ModelSpec

HEADER: dict[str, Any] = {
    "llama.context_length": 512,
    "llama.embedding_length": 128,
    "llama.block_count": 2,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
MIXTRAL = {"llama.expert_count": 8, "llama.expert_used_count": 2}
EMBEDDING = np.zeros((10, 128), dtype=np.float32)
Write = Callable[..., ModelSpec]


@pytest.fixture
def read(tmp_path: Path) -> Write:
    def write_and_read(
        changes: dict[str, Any] | None = None,
        tensors: dict[str, np.ndarray] | None = None,
        poke: Callable[[bytes], bytes] = lambda data: data,
    ) -> ModelSpec:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in {**HEADER, **(changes or {})}.items():
            match value:
                case None:
                    pass
                case bool():
                    writer.add_bool(key, value)
                case int():
                    writer.add_int64(key, value)
                case float():
                    writer.add_float32(key, value)
                case str():
                    writer.add_string(key, value)
                case _:
                    writer.add_array(key, value)
        for name, tensor in (tensors or {"token_embd.weight": EMBEDDING}).items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        path.write_bytes(poke(path.read_bytes()))
        return read_spec(ModelSource("m", path, "gguf"), "bfloat16")

    return write_and_read


def test_a_plain_header(read: Write) -> None:
    spec = read()
    assert (spec.num_layers, spec.head_dim, spec.vocab_size) == (2, 32, 10)
    assert spec.sliding_window is None and spec.rope_scaling is None
    assert read({"llama.attention.sliding_window": 100}).sliding_window == 100
    assert read({"llama.attention.sliding_window": 0}).sliding_window is None
    assert read({"llama.attention.sliding_window": 512}).sliding_window is None


def test_experts_of_a_llama_make_it_a_mixtral(read: Write) -> None:
    spec = read(MIXTRAL)
    assert spec.architecture == "MixtralForCausalLM"
    assert spec.experts == Experts(8, 2, normalised=True) and spec.intermediate_size == 96
    assert read({**MIXTRAL, "llama.expert_feed_forward_length": 48}).intermediate_size == 48
    with pytest.raises(ModelFiles, match="9 experts for each token, but there are 8"):
        read({**MIXTRAL, "llama.expert_used_count": 9})
    with pytest.raises(ModelFiles, match="no 'llama.expert_used_count'"):
        read({"llama.expert_count": 8})


@pytest.mark.parametrize("kind", [None, "linear"])
@pytest.mark.parametrize("key", ["llama.rope.scaling.factor", "llama.rope.scale_linear"])
def test_linear_rope_scaling_with_or_without_its_type(
    read: Write, key: str, kind: str | None
) -> None:
    """llama.cpp takes a missing type for linear."""
    for factor in (0.0, 1.0):
        assert read({key: factor, "llama.rope.scaling.type": kind}).rope_scaling is None
    assert read({key: 4.0, "llama.rope.scaling.type": kind}).rope_scaling == LinearRope(4.0)
    assert read({key: 4.0, "llama.rope.scaling.type": "none"}).rope_scaling is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.attn_factor": 0.5,
            },
            "with attn_factor",
        ),
        ({"llama.rope.dimension_count": 16}, r"partial rotary embedding \(16 of 32\)"),
        ({"llama.attention.value_length": 64}, "values of 64 and keys of 32"),
        ({**MIXTRAL, "llama.expert_gating_func": 2}, "expert_gating_func 2"),
        ({**MIXTRAL, "llama.expert_shared_count": 1}, "expert_shared_count 1"),
        ({**MIXTRAL, "llama.expert_weights_scale": 2.5}, r"expert_weights_scale 2\.5"),
    ],
)
def test_what_is_not_implemented_is_refused(read: Write, changes: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read(changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.alignment": 0}, "'general.alignment' is 0"),
        ({"general.alignment": -32}, "'general.alignment' is -32"),
        ({"general.alignment": [1, 2]}, r"'general.alignment' is \[1, 2\]"),
        ({"llama.attention.sliding_window": "wide"}, "not an integer"),
        ({"llama.attention.sliding_window": [5, 6]}, "not an integer"),
        ({"llama.attention.sliding_window": -3}, "window of -3"),
        ({"llama.embedding_length": 0}, "not a positive integer"),
        ({"llama.block_count": 0}, "not a positive integer"),
        ({"llama.block_count": -1}, "not a positive integer"),
        ({"llama.block_count": True}, "True, not an integer"),
        ({"llama.attention.head_count_kv": 3}, "cannot share"),
        ({"llama.rope.freq_base": float("nan")}, "not a positive number"),
        ({"llama.attention.layer_norm_rms_epsilon": float("inf")}, "not a positive number"),
    ],
)
def test_a_malformed_header_names_what_is_wrong(read: Write, changes: Any, message: str) -> None:
    with pytest.raises(ModelFiles, match=message):
        read(changes)


def test_malformed_tensors(read: Write) -> None:
    with pytest.raises(ModelFiles, match="'token_embd.weight' is missing"):
        read(tensors={"other": EMBEDDING})
    for shape in ((5,), (2, 2, 2), ()):
        with pytest.raises(ModelFiles, match="'token_embd.weight' has shape"):
            read(tensors={"token_embd.weight": np.zeros(shape, dtype=np.float32)})
    for divisor in (0.0, float("nan"), -1.0):
        with pytest.raises(ModelFiles, match="no frequencies' divisors"):
            divisors = np.full(16, divisor, dtype=np.float32)
            read(tensors={"token_embd.weight": EMBEDDING, "rope_freqs.weight": divisors})


def test_a_tensor_beyond_the_end_of_any_file(read: Write) -> None:
    name = b"rope_freqs.weight"

    def move(data: bytes) -> bytes:
        # After the name: number of dimensions, one dimension, type, offset.
        at = data.index(name) + len(name) + 4 + 8 + 4
        return data[:at] + struct.pack("<Q", (1 << 63) + 32) + data[at + 8 :]

    tensors = {"token_embd.weight": EMBEDDING, name.decode(): np.ones(16, dtype=np.float32)}
    with pytest.raises(ModelFiles, match="truncated inside tensor 'rope_freqs.weight'"):
        read(tensors=tensors, poke=move)


def test_arrays_in_arrays(tmp_path: Path) -> None:
    path = tmp_path / "deep.gguf"
    array = struct.pack("<IQ", 9, 1) * 1500 + struct.pack("<IQ", 4, 0)
    key = struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + array)
    with pytest.raises(ModelFiles, match="nested too deep"):
        read_spec(ModelSource("m", path, "gguf"), "bfloat16")


def test_a_flag_is_a_flag_and_no_number(tmp_path: Path) -> None:
    file = GgufFile(tmp_path / "m.gguf", {"flag": False, "count": 3}, {}, 0)
    assert file.get("flag", bool) is False
    with pytest.raises(ModelFiles, match="'flag' is False, not an integer"):
        file.get("flag", int)
    with pytest.raises(ModelFiles, match="'flag' is False, not a number"):
        file.get("flag", float)
    with pytest.raises(ModelFiles, match="'count' is 3, not a flag"):
        file.get("count", bool)
