"""From a model to a profile: draw shapes, measure them in turns, fit, judge."""

import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

import kunserve
from kunserve.core.config import MIB, InstanceConfig, ModelConfig, SchedulerConfig
from kunserve.core.cost import DENSE, NO_WINDOWS, CostSample, ExpertChoice, Windows
from kunserve.core.errors import ConfigError
from kunserve.core.ids import InstanceId
from kunserve.engine.body import EngineBody
from kunserve.engine.cpu.kernels.levels import processor_name
from kunserve.engine.devices import open_backend
from kunserve.model.config import read_spec
from kunserve.model.profile import FORMAT, Profile, ProfileSubject, RegionError
from kunserve.model.source import resolve_model
from kunserve_lab.profile.cost_fit import fit, held_out_errors, sized
from kunserve_lab.profile.cost_forms import forms_for, from_vector
from kunserve_lab.profile.journal import Journal, Plan
from kunserve_lab.profile.shapes import ShapeLimits, draw_shapes
from kunserve_lab.profile.stopwatch import Clock, DeviceClock, HostClock, Reading, Stopwatch

KV_BYTES = 512 * MIB
MOST_KV_TOKENS = 32768
LONGEST_CONTEXT = 8192
LEAST_CONTEXT = 256
"""Of all sequences of a batch together. With less there are no lengths to tell apart."""
LEAST_OF_A_DECODE = 16
"""Tokens of context for each decode of the batch that has most of them."""
_MOST_PARTS = 8
"""Of a batch beside its decodes; the last block of each is counted whole."""
KV_PIECE = (1 << 20) - 3
"""Numbers that KV memory is filled with, again and again: no row begins where another does."""


@dataclass(frozen=True, slots=True)
class BodySettings:
    """What is measured, and where."""

    model: ModelConfig
    block_size: int
    num_threads: int
    device: str = "cpu"
    kv_bytes: int | None = None
    """KV memory. None: what the largest batches need, on a CPU 512 MiB at most."""
    scheduler: SchedulerConfig | None = None
    """The limits of steps. A GPU records steps within them as graphs, as it does when it serves."""
    num_ranks: int = 1
    """Among which the threads are divided."""

    @property
    def clock(self) -> Clock:
        """What times its steps best."""
        return DeviceClock() if self.device == "cuda" else HostClock(self.num_processors)

    @property
    def num_processors(self) -> int:
        """That a step computes on, if there are as many."""
        return max(self.num_ranks, self.num_threads)


def open_body(settings: BodySettings, number: int = 0) -> EngineBody:
    """An instance of its own for measuring. On the CPU its KV memory is touched.

    Instances take several GPUs in turn by their numbers, as those that serve do.
    """
    model, device = settings.model, settings.device
    source = resolve_model(model.model, model.load_format)
    token_bytes = read_spec(source, model.dtype).block_bytes(1)
    most_bytes = MOST_KV_TOKENS * token_bytes
    instance = InstanceConfig(
        kv_cache_memory_bytes=settings.kv_bytes
        or (min(KV_BYTES, most_bytes) if device == "cpu" else most_bytes),
        block_size=settings.block_size,
        num_threads=settings.num_threads,
        tensor_parallel_size=settings.num_ranks,
        device=device,
    )
    instance_id = InstanceId(number)
    backend = open_backend(model, source, instance, instance_id)
    body = EngineBody(instance_id, model, instance, source, settings.scheduler, backend)
    if device == "cpu":
        for shard in body.memory.shards:
            _fill(shard.unit_view(0, body.spec.kv_units), body.model.dtype)
    return body


def _fill(memory: npt.NDArray[np.uint8], dtype: str) -> None:
    """Other numbers everywhere: tokens that all attend to the same would choose the same experts.

    A piece of them is repeated, because drawing gigabytes takes long.
    """
    generator = torch.Generator().manual_seed(0)
    piece = torch.randn(KV_PIECE, generator=generator).to(getattr(torch, dtype))
    values = piece.view(torch.uint8).numpy()
    flat = memory.reshape(-1)
    for start in range(0, len(flat), len(values)):
        part = flat[start : start + len(values)]
        part[:] = values[: len(part)]


def limits_of(body: EngineBody, max_batch_tokens: int, max_decodes: int) -> ShapeLimits:
    """The largest batches that this body can be measured with.

    Fewer decodes than asked for where its KV memory does not hold so many with some context each.
    """
    spec = body.spec
    num_tokens = spec.kv_units // spec.num_layers * spec.block_size
    room = num_tokens - _MOST_PARTS * spec.block_size
    max_decodes = min(
        max_decodes,
        room // (spec.block_size + LEAST_OF_A_DECODE),
        (room - LEAST_CONTEXT) // spec.block_size,
    )
    if max_decodes < 1:
        least = LEAST_CONTEXT + (_MOST_PARTS + 1) * spec.block_size
        raise ConfigError(
            f"{spec.kv_units * spec.unit_bytes / MIB:.0f} MiB of KV memory hold {num_tokens} tokens"
            f" of this model; a profile in blocks of {spec.block_size} needs {least}: give a "
            "smaller --block-size, or serve without a profile"
        )
    room -= max_decodes * spec.block_size
    context = min(body.model.max_position, LONGEST_CONTEXT, room // 2)
    return ShapeLimits(min(max_batch_tokens, context // 2), context, max_decodes, room)


def make_plan(
    subject: ProfileSubject, limits: ShapeLimits, num_per_region: int, num_repeats: int, seed: int
) -> Plan:
    """What to measure."""
    return Plan(subject, num_repeats, draw_shapes(num_per_region, limits, seed))


def is_alone(repeat: int) -> bool:
    """Whether the neighbours rest in this repeat: in every other one."""
    return repeat % 2 == 1


class Company(Protocol):
    """The other instances of the machine meanwhile."""

    def let_rest(self, rests: bool) -> None:
        """Stand still, or go on. Returns once they do."""
        ...

    def check(self) -> None:
        """Raise ConfigError if they are not all there any more."""
        ...


def measure(
    stopwatch: Stopwatch,
    plan: Plan,
    journal: Journal,
    company: Company,
    advance: Callable[[], None],
) -> None:
    """Every shape once, then every shape again, ...: a disturbance spoils one repeat of each."""
    for shape in plan.shapes[:3]:
        stopwatch.measure(shape)
    for repeat in range(plan.num_repeats):
        company.let_rest(is_alone(repeat))
        for index, shape in enumerate(plan.shapes):
            if len(journal.found[index]) <= repeat:
                reading = stopwatch.measure(shape)
                company.check()  # else the journal would keep what was measured without it
                journal.note(index, reading)
                advance()


def make_profile(
    plan: Plan,
    found: list[list[Reading]],
    clock: str,
    num_instances: int,
    seed: int,
    device: str = "cpu",
    experts: ExpertChoice = DENSE,
    windows: Windows = NO_WINDOWS,
) -> Profile:
    """Fit the least of the repeats; judge every cost model on the same samples.

    The least, since a neighbour on the machine only ever adds time. How long steps take among
    neighbours that compute, and while they rest, is fitted to the medians of those wall times.
    """
    samples: list[CostSample] = []
    beside: list[CostSample] = []
    alone: list[CostSample] = []
    for shape, readings in zip(plan.shapes, found, strict=True):
        sample = CostSample(
            shape.region,
            shape.prefixes,
            shape.lengths,
            shape.num_samples,
            min(reading.seconds for reading in readings),
        )
        samples.append(sample)
        for group, rests in ((beside, False), (alone, True)):
            walls = [r.wall_s for i, r in enumerate(readings) if is_alone(i) is rests]
            group.append(replace(sample, seconds=statistics.median(walls)))
    forms = forms_for(experts, windows)
    ours = sized(samples, forms[0])
    errors = {
        form.name: {
            region: RegionError(**asdict(error))
            for region, error in held_out_errors(samples, form, seed).items()
        }
        for form in forms
    }
    return Profile(
        format=FORMAT,
        subject=plan.subject,
        device=device_name(device),
        clock=clock,
        versions={
            "kunserve": kunserve.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
        },
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        coefficients=from_vector(fit(samples, ours), ours.experts, windows),
        num_instances=num_instances,
        serving=from_vector(fit(beside, ours), ours.experts, windows),
        alone=from_vector(fit(alone, ours), ours.experts, windows),
        errors=errors,
        samples=tuple(samples),
    )


def device_name(device: str = "cpu") -> str:
    """The GPU's name, or the CPU's own name where Linux tells it."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return processor_name()
