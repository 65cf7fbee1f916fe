"""P3: two processes give the tokens of transformers through a drop and a restore.

In float32 all of them. In bfloat16 products are rounded differently from batch to batch, so there a
token may differ where the reference itself hardly prefers one.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import transformers

from benchmarks.gpu_kit.parts import Part
from benchmarks.gpu_phases.live import Answer, Asker, describe, with_cluster
from benchmarks.gpu_phases.machine import FAKE_GRANULARITY_BYTES, MIB, Machine
from benchmarks.report import Report, Setting
from kunserve.core.config import (
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    ModelConfig,
    OverloadConfig,
    SchedulerConfig,
)

Dtype = Literal["bfloat16", "float32"]
VOCAB = 160
_NUM_LAYERS = 4
_LENGTHS = (5, 18, 31, 44, 57)
_NUM_TOKENS = 40
_NUM_LOGPROBS = 5
_TOLERANCE = 0.25
"""In bfloat16, of a log-probability."""


def run(machine: Machine, report: Report) -> None:
    """A random model, written to a folder, served, and asked."""
    machine.do(
        Part("float32", partial(_float32, machine, report)),
        Part("bfloat16", partial(_bfloat16, machine, report)),
    )


def _float32(machine: Machine, report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, prompts = make_model(machine.is_real), make_prompts()
        model.save_pretrained(folder)
        expected = {name: expected_tokens(model, prompt) for name, prompt in prompts.items()}
        answers = answers_of(machine, report, folder, prompts, "float32")
    differ = check_float32(report, answers, expected)
    assert not differ, f"float32 tokens differ: {differ}"


def _bfloat16(machine: Machine, report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, prompts = make_model(machine.is_real), make_prompts()
        model.save_pretrained(folder)
        rounded = answers_of(machine, report, folder, prompts, "bfloat16")
    unexplained = _check_bfloat16(report, model.bfloat16().float(), prompts, rounded)
    assert not unexplained, f"bfloat16 tokens differ where they must not: {unexplained}"


def make_prompts() -> dict[str, list[int]]:
    """By name: some are asked early, and some late."""
    return {
        f"{when}{length}": np.random.default_rng(length).integers(3, VOCAB, length).tolist()
        for when in ("early", "late")
        for length in _LENGTHS
    }


def answers_of(
    machine: Machine,
    report: Report,
    folder: str,
    prompts: dict[str, list[int]],
    dtype: Dtype,
    num_ranks: int = 1,
) -> dict[str, Answer]:
    """What two instances say: half is asked before a drop, the rest before the restore."""
    answers: dict[str, Answer] = {}

    async def story(asker: Asker) -> None:
        early = [name for name in prompts if name.startswith("early")]
        for name in early:
            asker.ask(name, prompts[name], _NUM_TOKENS, _NUM_LOGPROBS)
        await asker.flow(3)
        record = await asker.change(lambda: asker.cluster.drop(None))
        describe(report, record, dtype=dtype)
        for name in prompts.keys() - set(early):
            asker.ask(name, prompts[name], _NUM_TOKENS, _NUM_LOGPROBS)
        await asker.flow(5)
        describe(report, await asker.change(asker.cluster.restore), dtype=dtype)
        await asker.done()
        answers.update(asker.answers)

    with_cluster(config_of(machine, folder, dtype, num_ranks), VOCAB, story)
    return answers


def check_float32(
    report: Report, answers: dict[str, Answer], expected: dict[str, list[int]]
) -> list[str]:
    """The answers that differ from those of transformers."""
    differ = [name for name, tokens in expected.items() if answers[name].tokens != tokens]
    report.add("answers", len(expected), "", dtype="float32")
    equal = len(expected) - len(differ)
    report.add("answers equal to those of transformers", equal, "", dtype="float32")
    for name in differ:
        pairs = zip(answers[name].tokens, expected[name], strict=True)
        first = next(at for at, (got, want) in enumerate(pairs) if got != want)
        report.add("first other token", first, "", request=name)
    return differ


def _check_bfloat16(
    report: Report,
    model: transformers.PreTrainedModel,
    prompts: dict[str, list[int]],
    answers: dict[str, Answer],
) -> list[str]:
    """Each token after those that came before it: what float32 says of the same weights.

    Returns the tokens that another one beats by more than ``_TOLERANCE``.
    """
    unexplained, num_other, largest_margin, largest_error = [], 0, 0.0, 0.0
    for name, prompt in prompts.items():
        answer = answers[name]
        ids = torch.tensor([prompt + answer.tokens])
        with torch.no_grad():
            rows = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
        for at, (row, token, said) in enumerate(
            zip(rows, answer.tokens, answer.logprobs, strict=True)
        ):
            margin = float(row.max() - row[token])
            num_other += margin > 0
            largest_margin = max(largest_margin, margin)
            if margin > _TOLERANCE:
                unexplained.append(f"{name}[{at}] by {margin:.3f}")
            assert said is not None, name
            errors = (abs(float(row[one]) - logprob) for one, logprob in said.top)
            largest_error = max(largest_error, *errors)
    where: dict[str, Setting] = {"dtype": "bfloat16", "tolerance": _TOLERANCE}
    report.add("tokens", sum(len(answer.tokens) for answer in answers.values()), "", **where)
    report.add("other tokens than float32's", num_other, "", **where)
    report.add("largest margin of those", largest_margin, "", **where)
    report.add("largest error of a log-probability", largest_error, "", **where)
    return unexplained


def make_model(is_real: bool) -> transformers.PreTrainedModel:
    """On a GPU layers of several granules. Weights so large that tokens vary."""
    torch.manual_seed(0)
    hidden, intermediate, heads, kv_heads = (768, 2048, 12, 4) if is_real else (64, 96, 4, 2)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
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


def expected_tokens(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
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


def config_of(machine: Machine, folder: str, dtype: Dtype, num_ranks: int = 1) -> KunServeConfig:
    """Two instances with little memory."""
    real = machine.is_real
    return KunServeConfig(
        model=ModelConfig(model=str(Path(folder)), dtype=dtype),
        instance=InstanceConfig(
            device=machine.instance_device,
            tensor_parallel_size=num_ranks,
            kv_cache_memory_bytes=64 * MIB if real else MIB,
            block_size=16 if real else 8,
            granule_bytes=2 * MIB if real else FAKE_GRANULARITY_BYTES,
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=48, min_microbatch_tokens=8),
        overload=OverloadConfig(policy="drop", restore_below=0.0),
        cluster=ClusterConfig(num_instances=2),
    )
