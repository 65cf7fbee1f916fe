"""Tiny random models of every supported architecture, saved as Hugging Face folders."""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# Threads meet at a barrier after each tiny operation: ten times slower where cores are shared.
torch.set_num_threads(1)

VOCAB = 160

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def _config(kind: str, num_layers: int) -> transformers.PretrainedConfig:
    sizes = {**_SIZES, "num_hidden_layers": num_layers}
    match kind:
        case "llama":
            return transformers.LlamaConfig(**sizes, tie_word_embeddings=True)
        case "llama3":
            return transformers.LlamaConfig(
                **sizes,
                tie_word_embeddings=False,
                rope_parameters=_LLAMA3_ROPE,
                attention_bias=True,
                mlp_bias=True,
            )
        case "qwen2":
            sizes.pop("head_dim")
            return transformers.Qwen2Config(**{**sizes, "hidden_size": 128})
        case "qwen3":
            return transformers.Qwen3Config(**sizes, tie_word_embeddings=True)
        case "mistral":
            return transformers.MistralConfig(**sizes, sliding_window=24)
        case "yarn":
            sizes |= {"max_position_embeddings": 64}
            return transformers.Qwen3Config(**sizes, rope_parameters=_YARN_ROPE)
        case "linear":
            sizes |= {"max_position_embeddings": 64}
            return transformers.LlamaConfig(**sizes, rope_parameters=_LINEAR_ROPE)
        case "granite":
            return transformers.GraniteConfig(
                **sizes,
                embedding_multiplier=12.0,
                residual_multiplier=0.22,
                attention_multiplier=0.11,
                logits_scaling=6.0,
                tie_word_embeddings=True,
                attention_bias=True,
            )
        case "phi3":
            sizes.pop("head_dim")
            return transformers.Phi3Config(**{**sizes, "hidden_size": 128}, sliding_window=24)
        case "seed_oss":
            return transformers.SeedOssConfig(
                **sizes, attention_dropout=0.0, residual_dropout=0.0, tie_word_embeddings=False
            )
        case "qwen2_local":
            sizes.pop("head_dim")
            return transformers.Qwen2Config(
                **{**sizes, "hidden_size": 128},
                use_sliding_window=True,
                sliding_window=24,
                max_window_layers=1,
            )
        case "smollm3":
            # YaRN, because its amplitude is not for layers that know no positions.
            sizes |= {"max_position_embeddings": 64}
            return transformers.SmolLM3Config(
                **sizes,
                no_rope_layers=[i % 2 for i in range(num_layers)],
                rope_parameters=_YARN_ROPE,
            )
        case "gemma2":
            return transformers.Gemma2Config(
                **sizes,
                query_pre_attn_scalar=20,
                sliding_window=24,
                attn_logit_softcapping=3.0,
                final_logit_softcapping=9.0,
                attn_implementation="eager",  # the only one that caps scores
            )
        case "gemma3":
            kinds = ("sliding_attention", "full_attention")
            return transformers.Gemma3TextConfig(
                **sizes,
                query_pre_attn_scalar=20,
                sliding_window=24,
                layer_types=[kinds[layer % 2] for layer in range(num_layers)],
                rope_parameters={
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                    "full_attention": _LINEAR_ROPE,
                },
            )
        case "ernie4_5":
            return transformers.Ernie4_5Config(**sizes, use_bias=True, tie_word_embeddings=True)
        case "mixtral":
            return transformers.MixtralConfig(
                **sizes, num_local_experts=5, num_experts_per_tok=2, sliding_window=24
            )
        case "olmoe":
            sizes.pop("head_dim")
            sizes |= {"hidden_size": 128, "intermediate_size": 24}
            return transformers.OlmoeConfig(**sizes, num_experts=11, num_experts_per_tok=4)
        case "qwen2_moe":
            sizes.pop("head_dim")
            return transformers.Qwen2MoeConfig(
                **{**sizes, "hidden_size": 128},
                moe_intermediate_size=24,
                shared_expert_intermediate_size=40,
                num_experts=9,
                num_experts_per_tok=2,
            )
        case "qwen3_moe":
            return transformers.Qwen3MoeConfig(
                **sizes,
                moe_intermediate_size=24,
                num_experts=7,
                num_experts_per_tok=3,
                norm_topk_prob=True,
            )
        case "stablelm":  # norms with biases, a quarter of each head is turned
            sizes.pop("head_dim")
            return transformers.StableLmConfig(
                **{**sizes, "hidden_size": 128}, use_qkv_bias=True, tie_word_embeddings=False
            )
        case "nemotron":  # an MLP without a gate, squares of what is positive
            sizes.pop("head_dim")
            return transformers.NemotronConfig(**{**sizes, "hidden_size": 128})
        case "glm4":  # four norms, half of each head is turned, by pairs side by side
            return transformers.Glm4Config(**{**sizes, "hidden_size": 128}, attention_bias=True)
        case _:
            raise ValueError(kind)


KINDS = ("llama", "llama3", "qwen2", "qwen3", "mistral")
"""With every operation that any model needs: most tests take one or all of these."""
SPARSE_KINDS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""With experts."""
FOREIGN_KINDS = ("stablelm", "nemotron", "glm4")
"""Which only vLLM's classes know: for `--engine vllm`."""
GEMMAS = ("gemma2", "gemma3")
MORE_KINDS = (
    "linear",
    "yarn",
    "granite",
    "phi3",
    "seed_oss",
    "ernie4_5",
    "qwen2_local",
    "smollm3",
    *SPARSE_KINDS,
    *GEMMAS,
)
"""Which differ from those by what is read from their files, or have operations of their own
(docs/models.md)."""


def tiny_model(
    kind: str, num_layers: int = 4, seed: int = 0, **changes: object
) -> transformers.PreTrainedModel:
    """A float32 model whose weights are large enough that its tokens vary.

    ``changes`` are of its configuration.
    """
    torch.manual_seed(seed)
    config = _config(kind, num_layers)
    config.update(changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    middle = 0.0 if kind in GEMMAS else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(middle - 0.4, middle + 0.4)
            else:
                parameter.normal_(0, 0.15)
    return model.float().eval()


def save_tiny(folder: Path, kind: str, num_layers: int = 4, **options: object) -> Path:
    """Save a tiny model where the loader looks for one."""
    tiny_model(kind, num_layers).save_pretrained(folder, **options)
    return folder


def expected_tokens(
    model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int
) -> list[int]:
    """What ``transformers`` generates greedily."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


def save_with_answers(
    folder: Path, kind: str, prompts: list[list[int]], num_tokens: int, **changes: object
) -> tuple[Path, list[list[int]]]:
    """Save a tiny model of four layers; the folder, and what ``transformers`` generates from it."""
    model = tiny_model(kind, **changes)  # type: ignore[arg-type]
    model.save_pretrained(folder)
    return folder, [expected_tokens(model, prompt, num_tokens) for prompt in prompts]


def greedy_after(
    model: transformers.PreTrainedModel, prompt: list[int], tokens: list[int]
) -> list[int]:
    """What ``transformers`` says greedily after the prompt, and after each token but the last.

    These are ``tokens`` exactly if they are what it generates. One pass over all of them tells,
    where ``generate`` would take one for each.
    """
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    return logits.argmax(dim=-1).tolist()


def prompt_logprobs(model: transformers.PreTrainedModel, prompt: list[int]) -> list[float]:
    """What ``transformers`` says of each token of the prompt but the first."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, :-1].float()
    found = torch.log_softmax(logits, dim=-1)[torch.arange(len(prompt) - 1), prompt[1:]]
    return found.tolist()


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer for these models: ASCII and a few longer tokens, 0 to 2 special.

    The last tokens of the vocabulary stand for nothing.
    """
    printable = [chr(code) for code in range(33, 127)]
    space, newline = "\u0120", "\u010a"  # how byte-level vocabularies spell them
    merges = [(space, "t"), ("t", "h"), ("th", "e"), ('"', ":"), ("1", "2"), ("a", "n"), ("e", "r")]
    tokens = ["<pad>", "<s>", "</s>", *printable, space, newline, *(a + b for a, b in merges)]
    assert len(set(tokens)) == len(tokens) < VOCAB
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
