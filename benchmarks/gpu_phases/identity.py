"""P3: in float32, two processes give the tokens of transformers through a drop and a restore."""

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from benchmarks.gpu_phases.live import Asker, describe, with_cluster
from benchmarks.gpu_phases.machine import FAKE_GRANULARITY_BYTES, MIB, Machine
from benchmarks.report import Report
from kunserve.core.config import (
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    ModelConfig,
    OverloadConfig,
    SchedulerConfig,
)

_VOCAB = 160
_NUM_LAYERS = 4
_LENGTHS = (5, 18, 31, 44, 57)
_NUM_TOKENS = 40


def run(machine: Machine, report: Report) -> None:
    """A random model, written to a folder, served, and asked."""
    with tempfile.TemporaryDirectory() as folder:
        model = _model(machine.is_real)
        model.save_pretrained(folder)
        prompts = {
            f"{when}{length}": np.random.default_rng(length).integers(3, _VOCAB, length).tolist()
            for when in ("early", "late")
            for length in _LENGTHS
        }
        expected = {name: _tokens(model, prompt) for name, prompt in prompts.items()}
        answers: dict[str, list[int]] = {}

        async def story(asker: Asker) -> None:
            early = [name for name in prompts if name.startswith("early")]
            for name in early:
                asker.ask(name, prompts[name], _NUM_TOKENS)
            await asker.flow(3)
            describe(report, await asker.change(lambda: asker.cluster.drop(None)))
            for name in prompts.keys() - set(early):
                asker.ask(name, prompts[name], _NUM_TOKENS)
            await asker.flow(5)
            describe(report, await asker.change(asker.cluster.restore))
            await asker.done()
            answers.update({name: answer.tokens for name, answer in asker.answers.items()})

        with_cluster(_config(machine, folder), _VOCAB, story)
    equal = sum(answers[name] == tokens for name, tokens in expected.items())
    report.add("answers", len(expected), "")
    report.add("answers equal to those of transformers", equal, "")
    for name, tokens in expected.items():
        if answers[name] != tokens:
            pairs = zip(answers[name], tokens, strict=True)
            first = next(at for at, (got, want) in enumerate(pairs) if got != want)
            report.add("first other token", first, "", request=name)
    assert equal == len(expected), "tokens differ"


def _model(is_real: bool) -> transformers.PreTrainedModel:
    """On a GPU layers of several granules. Weights so large that tokens vary."""
    torch.manual_seed(0)
    hidden, intermediate, heads, kv_heads = (768, 2048, 12, 4) if is_real else (64, 96, 4, 2)
    config = transformers.LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=_NUM_LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.normal_(0, 0.15 * (64 / hidden) ** 0.5)
    return model.float().eval()


def _tokens(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    """What transformers generates greedily, on the CPU."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=_NUM_TOKENS,
            min_new_tokens=_NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def _config(machine: Machine, folder: str) -> KunServeConfig:
    real = machine.is_real
    return KunServeConfig(
        model=ModelConfig(model=str(Path(folder)), dtype="float32"),
        instance=InstanceConfig(
            device=machine.instance_device,
            kv_cache_memory_bytes=64 * MIB if real else MIB,
            block_size=16 if real else 8,
            granule_bytes=2 * MIB if real else FAKE_GRANULARITY_BYTES,
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=48, min_microbatch_tokens=8),
        overload=OverloadConfig(policy="drop", restore_below=0.0),
        cluster=ClusterConfig(num_instances=2),
    )
