"""Models with random weights, as folders that a server or an instance can be given."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from benchmarks.gpu_phases.machine import GIB, MIB, SHAPES, Machine
from kunserve.core.errors import TooLittleMemory
from kunserve.model.spec import ModelSpec

BESIDE_BYTES = 12 * GIB
"""What two processes take of a device beside their arenas."""
_MOST_KV_BYTES = 24 * GIB
_LEAST_KV_BYTES = 8 * GIB


def config_file(spec: ModelSpec) -> dict[str, object]:
    """What a model folder says of a Qwen2 model, or of Qwen3's with experts."""
    sparse: dict[str, object] = {}
    if spec.experts is not None:
        sparse = {
            "model_type": "qwen3_moe",
            "moe_intermediate_size": spec.intermediate_size,
            "num_experts": spec.experts.number,
            "num_experts_per_tok": spec.experts.per_token,
            "norm_topk_prob": spec.experts.normalised,
        }
    return {
        "architectures": [spec.architecture],
        "model_type": "qwen2",
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position,
        "rope_theta": spec.rope_theta,
        "rms_norm_eps": spec.rms_eps,
        "tie_word_embeddings": spec.tied_embeddings,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
        **sparse,
    }


def write_model(spec: ModelSpec, folder: Path) -> Path:
    """A folder with a description and a tokenizer that has a word for each token."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_file(spec)), encoding="utf-8")
    words = {f"w{number}": number for number in range(spec.vocab_size)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"), pretty=False)
    return folder


def serving_model(machine: Machine) -> tuple[ModelSpec, int]:
    """A model of which two instances fit, and KV bytes that each of them can have. Raises
    TooLittleMemory.
    """
    if not machine.is_real:
        return SHAPES["tiny-words"], MIB
    free_bytes, _ = machine.driver().memory_bytes()
    for name in ("7b", "1.5b"):
        spec = SHAPES[name]
        kv_bytes = (free_bytes - BESIDE_BYTES) // 2 - spec.weights_bytes
        if kv_bytes >= _LEAST_KV_BYTES:
            return spec, min(kv_bytes, _MOST_KV_BYTES)
    raise TooLittleMemory(f"{free_bytes / GIB:.0f} GiB are free: too little for two instances")
