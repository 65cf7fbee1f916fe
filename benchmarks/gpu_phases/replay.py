"""P4: steps recorded as CUDA graphs: shorter, with the same tokens, and for good."""

import random
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.gpu_kit.parts import Part
from benchmarks.gpu_phases.arena import say_transitions, timed, transitions
from benchmarks.gpu_phases.machine import FAKE_GRANULARITY_BYTES, GIB, MIB, SHAPES, Machine, median
from benchmarks.gpu_phases.models import write_model
from benchmarks.report import Report
from kunserve.core.config import InstanceConfig, ModelConfig, SchedulerConfig
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.body import EngineBody
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.cuda.backend import CudaBackend
from kunserve_extras.torch_body.decoder import TorchDecoder
from kunserve_extras.torch_body.graphs import GraphCounts
from kunserve_lab.profile.shapes import BatchShape
from kunserve_lab.profile.stopwatch import HostClock, Stopwatch
from tests.direct_engine import DirectEngine, prepare_all

_LIMIT_S = 40.0
"""For drops and restores; of loading the layers anew most of all."""
_TIMED_ROUNDS = 5
_PAIR_BYTES = 100 * GIB
"""Two 14B models, 16 GiB of KV for each, and what lies beside."""


def run(machine: Machine, report: Report) -> None:
    """Transitions of two bodies that recorded their steps; then times without graphs."""
    machine.do(
        Part("drops, with graphs", partial(_recorded, machine, report)),
        Part("drops, without graphs", partial(_not_recorded, machine, report)),
    )


def _spec(machine: Machine) -> ModelSpec:
    if not machine.is_real:
        return SHAPES["tiny"]
    free_bytes, _ = machine.driver().memory_bytes()
    return SHAPES["14b" if free_bytes > _PAIR_BYTES else "1.5b"]


def _recorded(machine: Machine, report: Report) -> None:
    spec = _spec(machine)
    folder = write_model(spec, machine.folder / spec.name)
    with ExitStack() as stack:
        pair = [stack.enter_context(closing(_open(machine, spec, folder, n))) for n in range(2)]
        try:
            _transitions(machine, report, pair)
        finally:
            _steps(machine, report, pair[0], is_eager=False)


def _not_recorded(machine: Machine, report: Report) -> None:
    """The same calls of the driver in a process without graphs, and steps one by one."""
    spec = _spec(machine)
    folder = write_model(spec, machine.folder / spec.name)
    with closing(_open(machine, spec, folder, 0, is_eager=True)) as body:
        rounds = [transitions(body.memory.shards[0]) for _ in range(_TIMED_ROUNDS)]
        say_transitions(report, rounds, graphs=False)
        body.load_layers(LayerRange(spec.num_layers // 2, spec.num_layers))
        _steps(machine, report, body, is_eager=True)


def _open(
    machine: Machine, spec: ModelSpec, folder: Path, number: int, is_eager: bool = False
) -> EngineBody:
    real = machine.is_real
    recorder = None
    if not real:
        from tests.tape import TapeRecorder

        recorder = TapeRecorder()
    return EngineBody(
        InstanceId(number),
        ModelConfig(
            model=str(folder),
            load_format="dummy",
            dtype="bfloat16",
            # Plain torch attends to all positions in a recorded step.
            max_model_len=None if real else 64,
        ),
        InstanceConfig(
            memory_bytes=spec.weights_bytes + (16 * GIB if real else MIB),
            block_size=64 if real else 8,
            granule_bytes=64 * MIB if real else FAKE_GRANULARITY_BYTES,
            enforce_eager=is_eager,
        ),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=2048 if real else 48, max_num_seqs=256 if real else 4
        ),
        backend=CudaBackend(machine.torch_device, machine.library, recorder),
    )


def _counts(body: EngineBody) -> GraphCounts:
    decoder = body._decoder
    assert isinstance(decoder, TorchDecoder) and decoder.graph_counts is not None
    return decoder.graph_counts


def _steps(machine: Machine, report: Report, body: EngineBody, is_eager: bool) -> None:
    """Whole steps, sampling and all, as an instance runs them."""
    report.add("loaded and recorded in", body.account.load_s, "s", graphs=not is_eager)
    if not is_eager:
        report.add("graphs recorded", _counts(body).recorded, "")
    stopwatch = Stopwatch(body, HostClock(2))
    context, rounds = (512, 20) if machine.is_real else (20, 3)
    for num in (1, 4, 16, 64, 256) if machine.is_real else (1, 4):
        shape = BatchShape("decode", (context,) * num, (1,) * num, num)
        stopwatch.measure(shape)
        seconds = median([stopwatch.measure(shape).wall_s for _ in range(rounds)])
        report.add("step", seconds * 1e3, "ms", graphs=not is_eager, batch=num)
    if not is_eager:
        assert _counts(body).steps > 0, "no step used a graph"


def _transitions(machine: Machine, report: Report, pair: list[EngineBody]) -> None:
    """Drops at random places, a pipeline's tokens, restores, and a single instance's tokens."""
    num_layers = pair[0].spec.num_layers
    whole = LayerRange(0, num_layers)
    vocab = pair[0].model.vocab_size
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, vocab, n).tolist() for n in (5, 17, 30)]
    num_tokens = 16 if machine.is_real else 4
    expected = DirectEngine([(pair[0], whole)]).generate(prompts, num_tokens, 32)
    recorded = [_counts(body).recorded for body in pair]
    draw = random.Random(0)
    until = time.monotonic() + _LIMIT_S
    num_rounds = num_equal = num_answers = 0
    timings: list[dict[str, float]] = []
    while num_rounds < (100 if machine.is_real else 2) and time.monotonic() < until:
        cut = draw.randrange(1, num_layers)
        stages = (LayerRange(0, cut), LayerRange(cut, num_layers))
        for body, keep in zip(pair, stages, strict=True):
            timings.append(_timed_change(body, "drop", keep))
        answers = DirectEngine(list(zip(pair, stages, strict=True)))
        num_equal += answers.generate(prompts, num_tokens, 32) == expected
        for body, missing, timing in zip(pair, reversed(stages), timings[-2:], strict=True):
            timing |= _timed_change(body, "restore", missing)
            body.load_layers(missing)
        body = pair[num_rounds % 2]
        num_equal += DirectEngine([(body, whole)]).generate(prompts, num_tokens, 32) == expected
        num_answers += 2
        num_rounds += 1
        if num_rounds in (1, 5):  # what a phase that is stopped has shown
            say_transitions(report, timings, graphs=True, rounds=num_rounds)
    say_transitions(report, timings, graphs=True, rounds=num_rounds)
    for name in timings[0]:
        report.add(f"{name}, most", max(t[name] for t in timings) * 1e3, "ms", graphs=True)
    again = sum(_counts(body).recorded for body in pair) - sum(recorded)
    report.add("drops and restores of both", num_rounds, "")
    report.add("graphs launched", sum(_counts(body).launched for body in pair), "")
    report.add("recorded again", again, "")
    report.add("rounds of tokens", num_answers, "")
    report.add("of them as before the first drop", num_equal, "")
    assert again == 0, "graphs were recorded after the start"
    assert num_equal == num_answers, "tokens differ"


def _timed_change(body: EngineBody, kind: str, layers: LayerRange) -> dict[str, float]:
    """Seconds of each part of a drop to ``layers``, or of a restore of ``layers``."""
    memory = body.memory
    held = memory.shards[0].held
    wanted = layers
    if kind == "restore":
        wanted = LayerRange(min(held.first, layers.first), max(held.end, layers.end))
    refusal: list[str | None] = []
    seconds = {f"prepare a {kind}": timed(lambda: refusal.append(prepare_all(memory, wanted)))}
    assert refusal == [None], refusal
    change = memory.drop if kind == "drop" else memory.reclaim
    seconds[f"commit a {kind}"] = timed(lambda: change(layers))
    tidies = []
    while memory.shards[0].arena.num_aliases:
        tidies.append(timed(memory.shards[0].tidy))
    seconds[f"unmap after a {kind}, all"] = sum(tidies)
    seconds[f"unmap after a {kind}, longest"] = max(tidies, default=0.0)
    return seconds
