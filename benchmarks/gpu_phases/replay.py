"""P4: steps recorded as CUDA graphs: shorter, with the same tokens, and for good."""

import random
import time
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from benchmarks.gpu_phases.machine import FAKE_GRANULARITY_BYTES, GIB, MIB, SHAPES, Machine, median
from benchmarks.gpu_phases.models import write_model
from benchmarks.report import Report
from kunserve.core.config import InstanceConfig, ModelConfig, SchedulerConfig
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.body import EngineBody
from kunserve.engine.torch.cuda.backend import CudaBackend
from kunserve.engine.torch.decoder import TorchDecoder
from kunserve.engine.torch.graphs import GraphCounts
from kunserve.model.spec import ModelSpec
from kunserve_lab.profile.shapes import BatchShape
from kunserve_lab.profile.stopwatch import HostClock, Stopwatch
from tests.direct_engine import DirectEngine

_LIMIT_S = 60.0
"""For drops and restores; of loading the layers anew most of all."""


def run(machine: Machine, report: Report) -> None:
    """Steps with and without graphs; then transitions of two bodies that recorded theirs."""
    spec = SHAPES["1.5b" if machine.is_real else "tiny"]
    folder = write_model(spec, machine.folder / spec.name)
    for is_eager in (False, True):
        with closing(_open(machine, spec, folder, 0, is_eager)) as body:
            _steps(machine, report, body, is_eager)
    with ExitStack() as stack:
        pair = [stack.enter_context(closing(_open(machine, spec, folder, n))) for n in range(2)]
        _transitions(machine, report, pair)


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
        ModelConfig(model=str(folder), load_format="dummy", dtype="bfloat16"),
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
    while num_rounds < (100 if machine.is_real else 2) and time.monotonic() < until:
        cut = draw.randrange(1, num_layers)
        stages = (LayerRange(0, cut), LayerRange(cut, num_layers))
        for body, keep in zip(pair, stages, strict=True):
            refusal = body.memory.prepare(keep)
            assert refusal is None, refusal
            body.memory.drop(keep)
        answers = DirectEngine(list(zip(pair, stages, strict=True)))
        num_equal += answers.generate(prompts, num_tokens, 32) == expected
        for body, missing in zip(pair, reversed(stages), strict=True):
            body.memory.reclaim(missing)
            body.load_layers(missing)
        body = pair[num_rounds % 2]
        num_equal += DirectEngine([(body, whole)]).generate(prompts, num_tokens, 32) == expected
        num_answers += 2
        num_rounds += 1
    again = sum(_counts(body).recorded for body in pair) - sum(recorded)
    report.add("drops and restores of both", num_rounds, "")
    report.add("graphs launched", sum(_counts(body).launched for body in pair), "")
    report.add("recorded again", again, "")
    report.add("rounds of tokens", num_answers, "")
    report.add("of them as before the first drop", num_equal, "")
    assert again == 0, "graphs were recorded after the start"
    assert num_equal == num_answers, "tokens differ"
