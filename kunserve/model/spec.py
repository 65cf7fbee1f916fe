"""The shape of a decoder-only transformer, and every size that follows from it.

All memory arithmetic of the project lives here: nobody else multiplies layers by bytes.
"""

from dataclasses import dataclass

from kunserve.core.cost import NO_WINDOWS, Windows
from kunserve.core.errors import ConfigError
from kunserve.model.experts import Experts
from kunserve.model.packed import PackedWeights
from kunserve.model.rope import RopeScaling

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Bytes of weights that lie as another engine's model wants them."""

    embedding_bytes: int
    layer_bytes: int
    """Of the largest layer."""
    head_bytes: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder of the Llama family (docs/models.md lists them)."""

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Inner width of the MLP, or of each expert."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rope_theta: float
    rms_eps: float
    tied_embeddings: bool
    attention_bias: bool
    """Whether q, k and v projections carry a bias (Qwen2)."""
    output_bias: bool
    """Whether the attention output projection carries one too (Llama's ``attention_bias``)."""
    mlp_bias: bool
    qk_norm: bool
    """Whether q and k are RMS-normalised per head (Qwen3)."""
    rope_scaling: RopeScaling | None
    sliding_window: int | None
    """Attention window in tokens, if any layer has one shorter than ``max_position``."""
    dtype: str
    """Of weights, unless they are packed, of KV and activations."""
    embedding_scale: float = 1.0
    """By which embeddings are multiplied (Granite; see ``model.granite``)."""
    attention_scale: float = 1.0
    """By which scores are multiplied, beside ``head_dim ** -0.5`` (Granite)."""
    logit_scale: float = 1.0
    """By which the normalised rows are multiplied before the output head (Granite)."""
    has_fused_projections: bool = False
    """Whether files hold q, k and v as one tensor, and gate and up as another (Phi-3)."""
    has_paired_rope: bool = False
    """Whether files hold the two rotated values of a pair side by side (Ernie 4.5)."""
    packed: PackedWeights | None = None
    """How quantised weights lie in memory; None where all have ``dtype``."""
    sizes: WeightSizes | None = None
    """Of weights of another engine; None where they lie as ``packed`` says."""
    experts: Experts | None = None
    """In the place of every layer's MLP (Mixtral, OLMoE, Qwen3-MoE)."""
    has_whole_qk_norm: bool = False
    """Whether ``qk_norm`` is one norm over all heads instead of one for each (OLMoE)."""
    global_layers: tuple[int, ...] = ()
    """Layers that see every token, whatever the ``sliding_window`` of the others (Gemma)."""
    local_rope_theta: float | None = None
    """Base of the rotary embedding of layers with a window, if they have their own (Gemma 3).

    It is never scaled.
    """
    unturned_layers: tuple[int, ...] = ()
    """Layers that have no rotary embedding (SmolLM3)."""
    score_cap: float | None = None
    """Attention scores are bent so that none gets beyond it (Gemma 2)."""
    logit_cap: float | None = None
    """As ``score_cap``, of the logits."""
    has_gelu: bool = False
    """Whether the MLP's gate is GELU by tanh instead of SiLU (Gemma)."""
    has_offset_norms: bool = False
    """Whether norms multiply by 1 + weight, and round once instead of twice (Gemma)."""
    has_output_norms: bool = False
    """Whether what attention and the MLP give is normalised before it is added (Gemma)."""

    def window_of(self, layer: int) -> int | None:
        """The attention window of a layer; None where it sees every token."""
        return None if layer in self.global_layers else self.sliding_window

    @property
    def windows(self) -> Windows:
        """Of its layers."""
        if self.sliding_window is None:
            return NO_WINDOWS
        num_local = self.num_layers - len(self.global_layers)
        return Windows(num_local / self.num_layers, self.sliding_window)

    def unseen_share(self, num_tokens: int) -> float:
        """Of the KV of a sequence so long, what lies before the windows: no step reads it again."""
        unseen = 0
        for layer in range(self.num_layers):
            window = self.window_of(layer)
            unseen += 0 if window is None else max(0, num_tokens - window)
        return unseen / (self.num_layers * num_tokens)

    @property
    def num_ropes(self) -> int:
        """Rotary embeddings that layers have: the model's, and perhaps another one."""
        return 1 if self.local_rope_theta is None and not self.unturned_layers else 2

    def rope_of(self, layer: int) -> int:
        """Which of them a layer has."""
        if self.local_rope_theta is None:
            return int(layer in self.unturned_layers)
        return int(self.window_of(layer) is not None)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one KV element, and of one weight that is not packed."""
        return DTYPE_BYTES[self.dtype]

    @property
    def q_size(self) -> int:
        """Width of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key (or the value) projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Width of the fused query, key and value projection."""
        return self.q_size + 2 * self.kv_size

    @property
    def gated_size(self) -> int:
        """Inner values of one token: of all its experts, where there are some."""
        if self.experts is None:
            return self.intermediate_size
        shared = self.experts.shared_size or 0
        return self.intermediate_size * self.experts.per_token + shared

    @property
    def mlp_params(self) -> int:
        """Parameters of one MLP without biases: a layer's only one, or one expert."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Widths of the norms of q and k."""
        whole = self.has_whole_qk_norm
        return (self.q_size, self.kv_size) if whole else (self.head_dim, self.head_dim)

    @property
    def layer_params(self) -> int:
        """Parameters of one layer, with all its experts."""
        attention = self.hidden_size * self.qkv_size + self.q_size * self.hidden_size
        mlp = self.mlp_params
        if self.experts is not None:
            shared = 3 * self.hidden_size * (self.experts.shared_size or 0)
            router = self.experts.num_logits * self.hidden_size
            mlp = self.experts.held * self.mlp_params + shared + router
        norms = (4 if self.has_output_norms else 2) * self.hidden_size
        norms += sum(self.qk_norm_sizes) if self.qk_norm else 0
        biases = (
            (self.qkv_size if self.attention_bias else 0)
            + (self.hidden_size if self.output_bias else 0)
            + (2 * self.intermediate_size + self.hidden_size if self.mlp_bias else 0)
        )
        return attention + mlp + norms + biases

    def read_params(self, num_tokens: int) -> float:
        """Parameters of one layer that a step of so many tokens reads, on average."""
        if self.experts is None:
            return self.layer_params
        idle = self.experts.number - self.experts.choice.touched(num_tokens)
        return self.layer_params - idle * self.mlp_params

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's weights."""
        if (told := self.packed or self.sizes) is not None:
            return told.layer_bytes
        return self.layer_params * self.dtype_bytes

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the token embedding."""
        if (told := self.packed or self.sizes) is not None:
            return told.embedding_bytes
        return self.vocab_size * self.hidden_size * self.dtype_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of the final norm and, unless tied to the embedding, the output head."""
        if (told := self.packed or self.sizes) is not None:
            return told.head_bytes
        matrix = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        return (matrix + self.hidden_size) * self.dtype_bytes

    @property
    def weights_bytes(self) -> int:
        """Bytes of one whole copy of the model."""
        return self.embedding_bytes + self.num_layers * self.layer_bytes + self.head_bytes

    def unit_bytes(self, block_size: int) -> int:
        """Bytes of one unit: one layer's K and V of one block of ``block_size`` tokens."""
        return 2 * block_size * self.kv_size * self.dtype_bytes

    def block_bytes(self, block_size: int, num_layers: int | None = None) -> int:
        """Bytes of one block's KV over ``num_layers`` layers (all of them if None)."""
        layers = self.num_layers if num_layers is None else num_layers
        return layers * self.unit_bytes(block_size)


def period_of(model: ModelSpec) -> int:
    """Layers of which the last sees every token and all others a window.

    Raises ConfigError where the model's layers do not repeat that. Layers behind the last whole
    period have a window.
    """
    if model.sliding_window is None:
        raise ConfigError(f"{model.name} has no layers with a window: all of its KV is read again")
    seen = model.global_layers
    period = seen[0] + 1 if seen else 0
    if period < 2 or seen != tuple(range(period - 1, model.num_layers, period)):
        raise ConfigError(
            f"{model.name} has {model.num_layers} layers, of which "
            f"{', '.join(map(str, seen)) or 'none'} see every token; a ring is for models in which "
            "the last layer of every period does, as in Gemma 2 and 3"
        )
    return period
