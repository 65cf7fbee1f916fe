"""P9: transformers' continuous batching and ours, offline, on the same prompts."""

import dataclasses
import importlib.util
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import transformers

from benchmarks.gpu_kit.parts import Part
from benchmarks.gpu_phases.live import Asker, with_cluster
from benchmarks.gpu_phases.machine import FAKE_GRANULARITY_BYTES, GIB, MIB, SHAPES, Machine
from benchmarks.gpu_phases.models import config_file, write_model
from benchmarks.report import Report, Setting
from kunserve.core.config import (
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    ModelConfig,
    OverloadConfig,
    SchedulerConfig,
)
from kunserve.model.spec import ModelSpec


def run(machine: Machine, report: Report) -> None:
    """All prompts at once, greedy, each with equally many tokens: how long until all are done."""
    machine.do(
        Part("kunserve", partial(_measured, machine, report, "kunserve", _ours)),
        Part("transformers", partial(_measured, machine, report, "transformers", _theirs)),
    )


def _measured(machine: Machine, report: Report, name: str, measure: Callable[..., float]) -> None:
    spec = _shape(machine)
    prompts, num_tokens = _prompts(machine, spec)
    try:
        seconds = measure(machine, spec, prompts, num_tokens)
    except _NotThere as reason:
        report.add("not there", None, "", server=name, why=str(reason))
        return
    where: dict[str, Setting] = {"server": name, "model": spec.name, "prompts": len(prompts)}
    num_prompt_tokens = sum(map(len, prompts))
    report.add("all done after", seconds, "s", **where)
    report.add("output", len(prompts) * num_tokens / seconds, "tokens/s", **where)
    total = num_prompt_tokens + len(prompts) * num_tokens
    report.add("prompts and output", total / seconds, "tokens/s", **where)


class _NotThere(Exception):
    """What is here of transformers cannot do it."""


def _shape(machine: Machine) -> ModelSpec:
    if not machine.is_real:
        return SHAPES["tiny"]
    free_bytes, _ = machine.driver().memory_bytes()
    return SHAPES["7b" if free_bytes > 56 * GIB else "1.5b"]


def _prompts(machine: Machine, spec: ModelSpec) -> tuple[list[list[int]], int]:
    num, longest, num_tokens = (96, 1500, 128) if machine.is_real else (3, 20, 4)
    generator = np.random.default_rng(0)
    lengths = generator.integers(longest // 10, longest, num)
    return [generator.integers(3, spec.vocab_size, n).tolist() for n in lengths], num_tokens


def _ours(machine: Machine, spec: ModelSpec, prompts: list[list[int]], num_tokens: int) -> float:
    """One instance, without HTTP. The first prompt goes ahead, for what is compiled then."""
    real = machine.is_real
    took: list[float] = []

    async def story(asker: Asker) -> None:
        asker.ask("first", prompts[0], 2)
        await asker.done()
        began = time.monotonic()
        for number, prompt in enumerate(prompts):
            asker.ask(str(number), prompt, num_tokens)
        await asker.done()
        took.append(time.monotonic() - began)

    config = KunServeConfig(
        model=ModelConfig(
            model=str(write_model(spec, machine.folder / spec.name)),
            load_format="dummy",
            dtype="bfloat16",
        ),
        instance=InstanceConfig(
            device=machine.instance_device,
            memory_bytes=spec.weights_bytes + (16 * GIB if real else MIB),
            block_size=64 if real else 8,
            granule_bytes=64 * MIB if real else FAKE_GRANULARITY_BYTES,
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=2048 if real else 48),
        overload=OverloadConfig(policy="recompute"),
        cluster=ClusterConfig(num_instances=1),
    )
    with_cluster(config, spec.vocab_size, story)
    return took[0]


def _theirs(machine: Machine, spec: ModelSpec, prompts: list[list[int]], num_tokens: int) -> float:
    """`generate_batch` of a model with random weights of the same shape."""
    if not hasattr(transformers.GenerationMixin, "generate_batch"):
        raise _NotThere(f"transformers {transformers.__version__} has no generate_batch")
    if not machine.is_real and importlib.util.find_spec("psutil") is None:
        raise _NotThere("on a CPU it needs psutil")
    values = {k: v for k, v in config_file(spec).items() if k not in ("architectures",)}
    config = transformers.AutoConfig.for_model(**values)
    with torch.device(machine.torch_device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    generation = transformers.GenerationConfig(
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    limits = _their_limits(machine, prompts, num_tokens)
    try:
        model.generate_batch(prompts[:1], generation_config=generation, **limits)
        machine.synchronize()
        began = time.monotonic()
        answers = model.generate_batch(prompts, generation_config=generation, **limits)
        machine.synchronize()
        seconds = time.monotonic() - began
    except (ImportError, NotImplementedError, RuntimeError, ValueError) as error:
        # It is young, and wants other things of a machine with every release.
        raise _NotThere(f"{type(error).__name__}: {error}") from error
    lengths = {len(answer.generated_tokens) for answer in answers.values()}
    if len(answers) != len(prompts) or lengths != {num_tokens}:
        raise _NotThere(f"{len(answers)} answers of {sorted(lengths)} tokens came")
    return seconds


def _their_limits(machine: Machine, prompts: list[list[int]], num_tokens: int) -> dict[str, object]:
    """Room for all prompts at once and batches as large as ours; its own choice fills a device.

    Without flash-attn it masks all of its cache for every token of the largest batch.
    """
    kind = getattr(transformers, "ContinuousBatchingConfig", None)
    if kind is None:
        return {}
    page = 256 if machine.is_real else 16
    wanted = {
        "page_size": page,
        "block_size": page,
        "num_blocks": sum(-(-(len(prompt) + num_tokens) // page) + 1 for prompt in prompts),
        "max_batch_tokens": 2048 if machine.is_real else 48,
    }
    known = {field.name for field in dataclasses.fields(kind)}
    if "page_size" in known:
        del wanted["block_size"]  # its older name
    given = {name: value for name, value in wanted.items() if name in known}
    return {"continuous_batching_config": kind(**given)}
