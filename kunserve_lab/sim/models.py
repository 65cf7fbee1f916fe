"""Models by name, as the sizes and the work per token that a simulation needs.

Shapes are those of the models' public ``config.json``. A model is held in bfloat16 unless said
otherwise.
"""

from dataclasses import dataclass, replace

from kunserve.core.cost import NO_WINDOWS, ExpertChoice, Windows
from kunserve.core.errors import ConfigError
from kunserve.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class SimModel:
    """A decoder as bytes and operations. Layers are taken to be alike (the mean where not)."""

    name: str
    num_layers: int
    hidden_size: int
    dtype_bytes: int
    layer_bytes: int
    embedding_bytes: int
    head_bytes: int
    kv_token_bytes: int
    """K and V of one token at one layer."""
    dense_params: int
    """Parameters of a layer that every token uses."""
    expert_params: int
    """Parameters of one routed expert; 0 for a dense model."""
    num_experts: int
    experts_per_token: int
    activation_width: int
    """Elements that the operators between matrix products touch per token and layer."""
    prefill_pair_flops: int
    """Attention work for one query and one key of a prompt at one layer."""
    decode_pair_flops: int
    """The same when decoding: more under MLA, which attends in the compressed space."""
    max_model_len: int
    default_num_gpus: int
    """GPUs of an instance in the paper's table of models."""
    window: int | None = None
    """Tokens that layers see, all but the last of every ``period`` of them."""
    period: int = 1

    @property
    def weights_bytes(self) -> int:
        """One whole copy."""
        return self.embedding_bytes + self.num_layers * self.layer_bytes + self.head_bytes

    @property
    def token_params(self) -> int:
        """Parameters of a layer that one token uses."""
        return self.dense_params + self.experts_per_token * self.expert_params

    @property
    def experts(self) -> ExpertChoice:
        """Of a layer."""
        return ExpertChoice(self.num_experts, self.experts_per_token)

    @property
    def windows(self) -> Windows:
        """Of its layers."""
        if self.window is None:
            return NO_WINDOWS
        num_local = self.num_layers - self.num_layers // self.period
        return Windows(num_local / self.num_layers, self.window)

    def touched_bytes(self, num_tokens: int) -> float:
        """Weight bytes of a layer that a batch reads: experts nobody chose stay untouched."""
        if not self.num_experts:
            return self.layer_bytes
        experts = self.experts.touched(num_tokens) * self.expert_params
        return (self.dense_params + experts) * self.dtype_bytes


def from_spec(spec: ModelSpec, default_num_gpus: int = 1) -> SimModel:
    """A dense model of the Llama family."""
    pair_flops = 4 * spec.num_heads * spec.head_dim
    return SimModel(
        name=spec.name,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        dtype_bytes=spec.dtype_bytes,
        layer_bytes=spec.layer_bytes,
        embedding_bytes=spec.embedding_bytes,
        head_bytes=spec.head_bytes,
        kv_token_bytes=spec.unit_bytes(1),
        dense_params=spec.layer_params,
        expert_params=0,
        num_experts=0,
        experts_per_token=0,
        activation_width=16 * spec.hidden_size + 5 * spec.intermediate_size,
        prefill_pair_flops=pair_flops,
        decode_pair_flops=pair_flops,
        max_model_len=spec.max_position,
        default_num_gpus=default_num_gpus,
    )


def dense(
    name: str,
    layers: int,
    hidden: int,
    ffn: int,
    heads: tuple[int, int, int],
    vocab: int,
    length: int,
    *,
    gpus: int = 1,
    tied: bool = False,
    bias: bool = False,
    window: int | None = None,
    period: int = 1,
) -> SimModel:
    """One by its shape; ``heads`` are query heads, KV heads, and the width of each."""
    spec = ModelSpec(
        name=name,
        architecture="",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        vocab_size=vocab,
        max_position=length,
        rope_theta=1e6,
        rms_eps=1e-6,
        tied_embeddings=tied,
        attention_bias=bias,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        rope_scaling=None,
        sliding_window=None,
        dtype="bfloat16",
    )
    return replace(from_spec(spec, gpus), window=window, period=period)


def _quantised(model: SimModel, suffix: str, bits: float) -> SimModel:
    """The same with weights of so many bits, computed with as fast as plain ones where they are
    not read from memory.
    """
    share = bits / (8 * model.dtype_bytes)
    return replace(
        model,
        name=f"{model.name}-{suffix}",
        layer_bytes=int(model.layer_bytes * share),
        embedding_bytes=int(model.embedding_bytes * share),
        head_bytes=int(model.head_bytes * share),
    )


def _sparse(
    name: str,
    layers: int,
    hidden: int,
    heads: tuple[int, int, int],
    experts: tuple[int, int, int],
    vocab: int,
    length: int,
    *,
    gpus: int = 1,
) -> SimModel:
    """A Llama with a router and ``experts`` (number, chosen, inner width) for its FFN."""
    num_heads, kv_heads, head_dim = heads
    num_experts, per_token, ffn = experts
    attention = hidden * (num_heads + 2 * kv_heads) * head_dim + num_heads * head_dim * hidden
    dense = attention + 2 * hidden + 2 * head_dim + hidden * num_experts
    expert = 3 * hidden * ffn
    return SimModel(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        dtype_bytes=2,
        layer_bytes=2 * (dense + num_experts * expert),
        embedding_bytes=2 * vocab * hidden,
        head_bytes=2 * (vocab * hidden + hidden),
        kv_token_bytes=2 * 2 * kv_heads * head_dim,
        dense_params=dense,
        expert_params=expert,
        num_experts=num_experts,
        experts_per_token=per_token,
        activation_width=16 * hidden + 5 * per_token * ffn,
        prefill_pair_flops=4 * num_heads * head_dim,
        decode_pair_flops=4 * num_heads * head_dim,
        max_model_len=length,
        default_num_gpus=gpus,
    )


def _deepseek_v3() -> SimModel:
    """61 layers, the first 3 dense: routed experts and layer bytes are the mean over all 61."""
    hidden, heads, layers, num_dense, vocab = 7168, 128, 61, 3, 129_280
    q_rank, kv_rank, rope, nope, v_dim = 1536, 512, 64, 128, 128
    dense_ffn, expert_ffn, experts = 18_432, 2048, 256
    attention = (
        hidden * q_rank
        + q_rank * heads * (nope + rope)
        + hidden * (kv_rank + rope)
        + kv_rank * heads * (nope + v_dim)
        + heads * v_dim * hidden
        + q_rank
        + kv_rank
    )
    expert = 3 * hidden * expert_ffn
    num_sparse = layers - num_dense
    always = (
        layers * (attention + 2 * hidden)
        + num_dense * 3 * hidden * dense_ffn
        + num_sparse * (expert + hidden * experts)
    ) // layers
    routed = expert * num_sparse // layers
    return SimModel(
        name="deepseek-ai/DeepSeek-V3",
        num_layers=layers,
        hidden_size=hidden,
        dtype_bytes=2,
        layer_bytes=2 * (always + experts * routed),
        embedding_bytes=2 * vocab * hidden,
        head_bytes=2 * (vocab * hidden + hidden),
        kv_token_bytes=2 * (kv_rank + rope),
        dense_params=always,
        expert_params=routed,
        num_experts=experts,
        experts_per_token=8,
        activation_width=16 * hidden + 5 * 9 * expert_ffn,
        prefill_pair_flops=2 * heads * (nope + rope + v_dim),
        decode_pair_flops=2 * heads * (2 * kv_rank + rope),
        max_model_len=163_840,
        default_num_gpus=32,
    )


_QWEN_14B = dense("Qwen/Qwen2.5-14B", 48, 5120, 13_824, (40, 8, 128), 152_064, 32_768, bias=True)
MODELS = {
    model.name: model
    for model in (
        dense("smollm2-135m", 30, 576, 1536, (9, 3, 64), 49_152, 8192, tied=True),
        dense("Qwen/Qwen2.5-7B", 28, 3584, 18_944, (28, 4, 128), 152_064, 32_768, bias=True),
        _QWEN_14B,
        _quantised(_QWEN_14B, "Q8_0", 8.5),
        _quantised(_QWEN_14B, "Q4_K", 4.625),
        dense(
            "Qwen/Qwen2.5-72B", 80, 8192, 29_568, (64, 8, 128), 152_064, 32_768, gpus=4, bias=True
        ),
        dense("meta-llama/Llama-3.1-8B", 32, 4096, 14_336, (32, 8, 128), 128_256, 131_072),
        dense(
            "meta-llama/Llama-3.1-70B", 80, 8192, 28_672, (64, 8, 128), 128_256, 131_072, gpus=4
        ),
        dense(
            "meta-llama/Llama-3.1-405B", 126, 16_384, 53_248, (128, 8, 128), 128_256, 131_072,
            gpus=16,
        ),
        dense(
            "google/gemma-3-27b-it", 62, 5376, 21_504, (32, 16, 128), 262_208, 131_072, tied=True,
            window=1024, period=6,
        ),
        _sparse(
            "allenai/OLMoE-1B-7B-0924", 16, 2048, (16, 16, 128), (64, 8, 1024), 50_304, 4096
        ),
        _sparse(
            "mistralai/Mixtral-8x7B-v0.1", 32, 4096, (32, 8, 128), (8, 2, 14_336), 32_000, 32_768,
            gpus=2,
        ),
        _sparse("Qwen/Qwen3-30B-A3B", 48, 2048, (32, 4, 128), (128, 8, 768), 151_936, 40_960),
        _sparse(
            "Qwen/Qwen3-235B-A22B", 94, 4096, (64, 4, 128), (128, 8, 1536), 151_936, 40_960,
            gpus=8,
        ),
        _deepseek_v3(),
    )
}  # fmt: skip
"""Name -> model. Names are Hugging Face ids."""


def find_model(name: str) -> SimModel:
    """The model of that name; the organisation, case and an ``-Instruct`` ending do not matter."""

    def short(text: str) -> str:
        return text.lower().rpartition("/")[2].removesuffix("-instruct")

    for model in MODELS.values():
        if short(name) == short(model.name):
            return model
    raise ConfigError(f"no model {name!r} to simulate; there are: {', '.join(MODELS)}")
