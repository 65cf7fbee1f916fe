"""The decoder against transformers, and its own bits under other batching and layer splits."""

import dataclasses

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from kunserve.core.layout import LayerRange
from kunserve.engine.cpu.decoder import Decoder, StepBatch
from kunserve.engine.cpu.kernels.rope import RopeTable, inverse_frequencies
from kunserve.engine.layer_weights import LayerWeights, ModelWeights
from kunserve.model.rope import Llama3Rope
from kunserve.model.spec import ModelSpec
from tests.specs import model_spec
from tests.unit.engine.memory.test_memory import SMOLLM2
from tests.unit.engine.reference_attention import ReferenceDecoder

BLOCK_SIZE = 8
MAX_BLOCKS = 12
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(head_dim=32, **SHAPE),
    "llama-biased": lambda: transformers.LlamaConfig(
        head_dim=32, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE, **SHAPE
    ),
    "qwen2": lambda: transformers.Qwen2Config(**{**SHAPE, "num_attention_heads": 2}),
    "qwen3": lambda: transformers.Qwen3Config(head_dim=64, **SHAPE),
    "mistral": lambda: transformers.MistralConfig(head_dim=32, sliding_window=9, **SHAPE),
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def make_model(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(len(kind))
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:
            nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return model.to(dtype).eval()


def spec_of(model: nn.Module) -> ModelSpec:
    config = model.config
    layer = model.model.layers[0]
    rope = config.rope_parameters
    scaled = rope["rope_type"] == "llama3"
    return model_spec(
        architecture=type(model).__name__,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=layer.self_attn.head_dim,
        vocab_size=config.vocab_size,
        max_position=config.max_position_embeddings,
        rope_theta=rope["rope_theta"],
        rms_eps=config.rms_norm_eps,
        tied_embeddings=False,
        attention_bias=layer.self_attn.q_proj.bias is not None,
        output_bias=layer.self_attn.o_proj.bias is not None,
        mlp_bias=layer.mlp.up_proj.bias is not None,
        qk_norm=hasattr(layer.self_attn, "q_norm"),
        rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 32) if scaled else None,
        sliding_window=9 if "Mistral" in type(model).__name__ else None,
        dtype=str(model.dtype).removeprefix("torch."),
    )


def fused(*parts: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts]).detach()
    return torch.cat([part.weight for part in parts]).detach(), bias


def weights_of(model: nn.Module) -> ModelWeights:
    layers = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        qkv, qkv_bias = fused(attention.q_proj, attention.k_proj, attention.v_proj)
        gate_up, gate_up_bias = fused(mlp.gate_proj, mlp.up_proj)
        (o, o_bias), (down, down_bias) = fused(attention.o_proj), fused(mlp.down_proj)
        normed = hasattr(attention, "q_norm")
        layers.append(
            LayerWeights(
                input_norm=layer.input_layernorm.weight.detach(),
                qkv=qkv,
                qkv_bias=qkv_bias,
                q_norm=attention.q_norm.weight.detach() if normed else None,
                k_norm=attention.k_norm.weight.detach() if normed else None,
                o=o,
                o_bias=o_bias,
                post_norm=layer.post_attention_layernorm.weight.detach(),
                gate_up=gate_up,
                gate_up_bias=gate_up_bias,
                down=down,
                down_bias=down_bias,
            )
        )
    return ModelWeights(
        embedding=model.model.embed_tokens.weight.detach(),
        layers=layers,
        final_norm=model.model.norm.weight.detach(),
        head=model.lm_head.weight.detach(),
    )


class Bench:
    """A decoder over its own KV memory, fed with (sequence, tokens so far, new tokens)."""

    def __init__(
        self, model: nn.Module, threads: int = 1, decoder: type[Decoder] = Decoder
    ) -> None:
        self.spec = spec_of(model)
        layers, unit_bytes = self.spec.num_layers, self.spec.unit_bytes(BLOCK_SIZE)
        num_blocks = 4 * MAX_BLOCKS
        self.memory = np.full((num_blocks + 1) * layers * unit_bytes, 0xFF, dtype=np.uint8)
        entries = np.random.default_rng(0).permutation(num_blocks) * layers - 1
        self.tables = entries.reshape(4, MAX_BLOCKS).astype(np.int32)
        self.weights = weights_of(model)
        address = self.memory.ctypes.data + layers * unit_bytes
        self.decoder = decoder(self.spec, self.weights, address, BLOCK_SIZE, threads)

    def batch(self, chunks: list[tuple[int, int, list[int]]]) -> StepBatch:
        starts = np.cumsum([0] + [len(new) for _, _, new in chunks], dtype=np.int32)
        spans = [np.arange(past, past + len(new), dtype=np.int32) for _, past, new in chunks]
        return StepBatch(
            token_ids=np.concatenate([np.array(new, dtype=np.int32) for _, _, new in chunks]),
            positions=np.concatenate(spans),
            tables=self.tables,
            rows=np.array([s for s, _, _ in chunks], dtype=np.int32),
            q_starts=starts,
            context_lens=np.array([past + len(new) for _, past, new in chunks], dtype=np.int32),
            sample_rows=starts[1:] - 1,
        )

    def step(self, *chunks: tuple[int, int, list[int]]) -> torch.Tensor:
        """Logits after each chunk, [chunks, vocab]."""
        batch = self.batch(list(chunks))
        hidden = self.decoder.forward(batch, self.decoder.embed(batch))
        return self.decoder.logits(batch, hidden).clone()


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 96, n).tolist() for n in (21, 5, 40)]


@torch.no_grad()
@pytest.mark.parametrize("decoder", [Decoder, ReferenceDecoder])
@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_generation_is_transformers(kind, decoder):
    model = make_model(kind)
    bench = Bench(model, decoder=decoder)
    tokens = prompts()
    logits = bench.step(*[(s, 0, prompt) for s, prompt in enumerate(tokens)])
    for _ in range(6):
        for s, sequence in enumerate(tokens):
            wanted = model(torch.tensor([sequence])).logits[0, -1]
            torch.testing.assert_close(logits[s], wanted, rtol=1e-4, atol=1e-4)
            assert int(logits[s].argmax()) == int(wanted.argmax())
            sequence.append(int(wanted.argmax()))
        new = [(s, len(sequence) - 1, sequence[-1:]) for s, sequence in enumerate(tokens)]
        logits = bench.step(*new)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_bfloat16_is_close_to_transformers(kind):
    model = make_model(kind, torch.bfloat16)
    prompt = prompts()[2]
    wanted = model(torch.tensor([prompt])).logits[0, -1].float()
    logits = Bench(model).step((0, 0, prompt))[0]
    assert torch.cosine_similarity(logits, wanted, dim=0) > 0.998


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_do_not_depend_on_batching(dtype):
    model = make_model("llama", dtype)
    first, second, third = prompts()
    whole = Bench(model, threads=2).step((0, 0, first), (1, 0, second), (2, 0, third))
    alone = Bench(model)
    for s, prompt in enumerate((first, second, third)):
        assert torch.equal(alone.step((s, 0, prompt))[0], whole[s])
    chunked = Bench(model, threads=3)
    chunked.step((2, 0, third[:13]), (0, 0, first[:20]))
    last = chunked.step((0, 20, first[20:]), (2, 13, third[13:]), (1, 0, second))
    assert torch.equal(last, whole[[0, 2, 1]])
    token_by_token = Bench(model)
    for at, token in enumerate(first):
        logits = token_by_token.step((0, at, [token]))
    assert torch.equal(logits[0], whole[0])


def test_stages_in_a_row_are_the_whole():
    model = make_model("llama")
    prompt = prompts()[0]
    whole = Bench(model).step((0, 0, prompt))
    bench = Bench(model)
    batch = bench.batch([(0, 0, prompt)])
    hidden = bench.decoder.embed(batch)
    for layers in (LayerRange(0, 1), LayerRange(1, 3)):
        bench.decoder.set_layers(layers)
        hidden = bench.decoder.forward(batch, hidden)
    assert torch.equal(bench.decoder.logits(batch, hidden), whole)
    assert bench.decoder.greedy(batch, hidden).tolist() == whole.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_step_in_one_call_has_the_bits_of_its_parts(kind, dtype):
    model = make_model(kind, dtype)
    first, second, third = prompts()
    one, parts = Bench(model, threads=2), Bench(model, threads=2)
    # Prompts, one of which goes on; decodes; a step that samples nothing.
    for chunks in (
        [(0, 0, first), (1, 0, second[:3])],
        [(0, len(first), [7]), (1, 3, second[3:]), (2, 0, third)],
        [(0, len(first) + 1, [8]), (1, len(second), [9]), (2, len(third), [10])],
        [(0, len(first) + 2, [11])],
    ):
        batch = parts.batch(chunks)
        if len(chunks) == 2:  # the last one's row is not wanted
            batch.sample_rows = batch.sample_rows[:1]
        if len(chunks) == 1:
            batch.sample_rows = batch.sample_rows[:0]
        wanted = parts.decoder.logits(
            batch, parts.decoder.forward(batch, parts.decoder.embed(batch))
        )
        logits, found = one.decoder.run_whole(batch)
        assert torch.equal(logits, wanted)
        assert found.token_ids == wanted.argmax(dim=-1).tolist()
        assert found.values == wanted.amax(dim=-1).tolist()
    batch.token_ids = np.array([SHAPE["vocab_size"]], dtype=np.int32)
    with pytest.raises(IndexError, match="none of 96"):
        one.decoder.run_whole(batch)


def test_an_empty_step():
    model = make_model("llama")
    bench = Bench(model)
    empty = np.zeros(0, dtype=np.int32)
    batch = StepBatch(empty, empty, bench.tables, empty, np.zeros(1, np.int32), empty, empty)
    hidden = bench.decoder.forward(batch, bench.decoder.embed(batch))
    assert hidden.shape == (0, 64) and bench.decoder.logits(batch, hidden).shape == (0, 96)


def test_positions_are_the_same_however_the_table_grew() -> None:
    spec = dataclasses.replace(SMOLLM2, head_dim=96)
    angles = torch.outer(torch.arange(9000).float(), inverse_frequencies(spec))
    whole = torch.stack((angles.cos(), angles.sin()), dim=1)
    table = RopeTable(spec)
    table.reserve(5000)
    table.reserve(4000)
    table.reserve(9000)
    assert torch.equal(table._table, whole)
    before = table.address(9000)
    assert table.address(1) == before and table.num_bytes == 9000 * 96 * 4
    table.address(9001)
    assert torch.equal(table._table[:9000], whole)
