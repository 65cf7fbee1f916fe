"""P10: `--engine vllm` says the same tokens calmly and through a drop and a restore.

Random weights of a 14B model's shape. Where its engine or this device cannot, it says why.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.gpu_kit.parts import Part
from benchmarks.gpu_phases.live import Answer, Asker, describe, with_cluster
from benchmarks.gpu_phases.machine import GIB, MIB, SHAPES, Machine
from benchmarks.gpu_phases.models import BESIDE_BYTES, write_model
from benchmarks.report import Report
from kunserve.core.config import (
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    ModelConfig,
    OverloadConfig,
    SchedulerConfig,
)
from kunserve.core.errors import ConfigError, KunServeError
from kunserve.model.source import resolve_model
from kunserve.model.spec import ModelSpec
from kunserve_extras.vllm_body.refusals import check

_NUM_TOKENS = 40
_LENGTHS = (5, 33, 64, 150, 300)


def run(machine: Machine, report: Report) -> None:
    """The same prompts twice, in the order in which a burst would meet them."""
    machine.do(Part("tokens over drops", partial(_over_drops, machine, report)))


def config_of(machine: Machine, spec: ModelSpec) -> KunServeConfig:
    """Two instances of vLLM's classes with random weights, on one device."""
    real = machine.is_real
    kv_bytes = 4 * GIB if real else 2 * MIB
    return KunServeConfig(
        model=ModelConfig(
            model=str(write_model(spec, machine.folder / spec.name)),
            load_format="dummy",
            dtype="bfloat16",
        ),
        instance=InstanceConfig.of_device(
            "cuda" if real else "cpu",  # the stand-in for a driver has no kernels of vLLM's
            engine="vllm",
            memory_bytes=spec.weights_bytes + kv_bytes,
            granule_bytes=2 * MIB if real else 8192,
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=512 if real else 48),
        overload=OverloadConfig(policy="drop", restore_below=0.0),
        cluster=ClusterConfig(num_instances=2),
    )


def shape_of(machine: Machine) -> ModelSpec:
    """The largest of which two instances fit."""
    if not machine.is_real:
        return replace(SHAPES["tiny"], name="tiny-wide", hidden_size=128)  # heads of 32, as Qwen2's
    free_bytes, _ = machine.driver().memory_bytes()
    fits = (free_bytes - BESIDE_BYTES) // 2 - 4 * GIB
    return next(SHAPES[n] for n in ("14b", "7b", "1.5b") if SHAPES[n].weights_bytes <= fits)


def prompts_of(spec: ModelSpec) -> list[list[int]]:
    """Random ones, some of several blocks."""
    generator = np.random.default_rng(0)
    return [generator.integers(3, spec.vocab_size, n).tolist() for n in _LENGTHS]


def not_there(config: KunServeConfig) -> str | None:
    """Why it cannot run here."""
    try:
        check(config, resolve_model(config.model.model, load_format=config.model.load_format))
    except (ConfigError, KunServeError) as error:
        return str(error)
    return None


def _over_drops(machine: Machine, report: Report) -> None:
    spec = shape_of(machine)
    config = config_of(machine, spec)
    why = not_there(config)
    if why is not None:
        report.add("not there", None, "", model=spec.name, why=why)
        return
    prompts = prompts_of(spec)
    answers: dict[str, Answer] = {}

    async def story(asker: Asker) -> None:
        for number, prompt in enumerate(prompts):
            asker.ask(f"calm {number}", prompt, _NUM_TOKENS)
        await asker.done()
        for number, prompt in enumerate(prompts):
            asker.ask(f"dropped {number}", prompt, _NUM_TOKENS)
        await asker.flow(3)
        describe(report, await asker.change(lambda: asker.cluster.drop(None)), engine="vllm")
        await asker.flow(20)
        describe(report, await asker.change(asker.cluster.restore), engine="vllm")
        await asker.done()
        answers.update(asker.answers)

    with_cluster(config, spec.vocab_size, story)
    pairs = [
        (answers[f"calm {n}"].tokens, answers[f"dropped {n}"].tokens) for n in range(len(prompts))
    ]
    num_other = sum(
        one != other for calm, dropped in pairs for one, other in zip(calm, dropped, strict=True)
    )
    report.add("tokens", len(prompts) * _NUM_TOKENS, "", model=spec.name)
    report.add("kinds of tokens", len({t for calm, _ in pairs for t in calm}), "", model=spec.name)
    report.add("other tokens through the drop", num_other, "", model=spec.name)
    # A GPU's products round by the batch, so there the number is what is to be found out.
    assert machine.is_real or not num_other, f"{num_other} tokens differ"
