"""The built-in model, as it is."""

from collections.abc import Callable, Iterator

import gguf
import numpy as np
import pytest
import torch
import transformers

from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.body import EngineBody
from kunserve.model.source import resolve_model
from kunserve.model.tokenizer import load_tokenizer
from tests.direct_engine import DirectEngine

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain gravity to a child.",
    "List three prime numbers greater than ten.",
    "Translate 'good morning' to Spanish.",
    "Who wrote Romeo and Juliet?",
    "What does a compiler do?",
    "Name two rivers in Africa.",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "What is 7 times 8?",
    "Describe a rainy day in one sentence.",
    "What is the boiling point of water?",
    "Write a Python function that adds two numbers.",
    "What is photosynthesis?",
    "Tell me a short story about a fox.",
    "How many continents are there?",
    "What is the opposite of hot?",
    "Suggest a name for a cat.",
    "Summarise the water cycle.",
]


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return load_tokenizer(resolve_model("smollm2-135m"))


@pytest.fixture
def make_body() -> Iterator[Callable[..., EngineBody]]:
    made: list[EngineBody] = []

    def make(dtype: str, quantization: str = "none") -> EngineBody:
        instance = InstanceConfig(kv_cache_memory_bytes=160 << 20, num_threads=2)
        made.append(
            EngineBody(InstanceId(0), ModelConfig(dtype=dtype, quantization=quantization), instance)
        )  # type: ignore[arg-type]
        return made[-1]

    yield make
    for body in made:
        body.check()
        body.close()


def chat(tokenizer: transformers.PreTrainedTokenizerFast, text: str) -> list[int]:
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer.encode(rendered, add_special_tokens=False))


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("bfloat16", "none"), ("float32", "none"), ("bfloat16", "auto")]
)
def test_it_knows_the_capital_of_france(
    dtype: str,
    quantization: str,
    make_body: Callable[[str], EngineBody],
    tokenizer: transformers.PreTrainedTokenizerFast,
) -> None:
    engine = DirectEngine([(make_body(dtype, quantization), LayerRange(0, 30))])
    # How an answer begins is nearly a tie: with eight-bit rows another processor begins another
    # way. The name is sure: e^4 times as likely as what comes second.
    begun = chat(tokenizer, PROMPTS[0]) + tokenizer.encode("The capital of France is")
    (tokens,) = engine.generate([begun], 2)
    assert "Paris" in tokenizer.decode(tokens)


def transformers_model() -> transformers.PreTrainedModel:
    """The same file read by other means: the gguf package, and transformers' own modules."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    model = transformers.LlamaForCausalLM(config)
    state = {}
    stored = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(resolve_model("smollm2-135m").path).tensors
    }
    for name, parameter in model.named_parameters():
        base, _, kind = name.rpartition(".")
        values = stored[f"{names.get_name(base)}.{kind}"]
        if base.endswith(("q_proj", "k_proj")):
            heads = values.shape[0] // 64
            values = values.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(values.shape)
        state[name] = torch.from_numpy(np.array(values))
        assert parameter.shape == state[name].shape, name
    model.load_state_dict(state, strict=False)
    return model.eval()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_prompts_give_the_tokens_of_transformers(
    make_body: Callable[[str], EngineBody], tokenizer: transformers.PreTrainedTokenizerFast
) -> None:
    model = transformers_model()
    prompts = [chat(tokenizer, text) for text in PROMPTS]
    engine = DirectEngine([(make_body("float32"), LayerRange(0, 30))])
    found = engine.generate(prompts, 16, chunk_size=16)
    for prompt, tokens in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=16,
                min_new_tokens=16,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert tokens == output[0, len(prompt) :].tolist()
