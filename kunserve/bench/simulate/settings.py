"""What a simulation is asked to do: flags or a TOML file, as one value."""

import dataclasses
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kunserve.bench.simulate.run import Scenario
from kunserve.bench.simulate.systems import find_system
from kunserve.core.config import SchedulerConfig, ServerConfig
from kunserve.core.errors import ConfigError
from kunserve.model.profile import read_profile
from kunserve.sim.cluster import WorldConfig
from kunserve.sim.costs import cpu_profile, profile_times
from kunserve.sim.devices import find_device
from kunserve.sim.models import find_model
from kunserve.sim.profile import InstanceProfile, gpu_profile
from kunserve.workload.recipe import Dataset, Recipe, build_workload
from kunserve.workload.workload import Lengths, Workload


@dataclass(frozen=True, slots=True)
class Setup:
    """The cluster."""

    model: str = "Qwen/Qwen2.5-14B"
    device: str = "a800"
    num_instances: int = 8
    gpus_per_instance: int | None = None
    """None: as in the paper's table of models."""
    profile: Path | None = None
    """A file of ``kunserve profile``: CPU instances of its model instead of GPUs."""
    instance_mib: int = 785
    """Memory of such an instance."""
    memory_utilization: float = 0.9
    block_size: int = 64
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    stage_host_share: float = 1.0
    """Of the host's time per step and sequence, what each stage of a pipeline but its last pays."""
    start_s: float = 120.0
    """From the order for a new instance to its readiness."""
    kills: tuple[tuple[float, int], ...] = ()
    """(seconds, instance) of each death."""
    host_gib: float | None = None
    """Host memory of each instance for swapped KV; None is no limit."""
    max_num_queued_reqs: int | None = None
    """Waiting requests beyond which new ones are refused; None is no limit, as is the next."""
    max_num_queued_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """The workload. ``scale`` multiplies the rate of a trace and keeps its pattern."""

    trace: Path | None = None
    """A trace with arrivals. None: the built-in bursty window."""
    lengths: Path | None = None
    """A CSV whose lengths replace those of the trace."""
    burstgpt_lengths: bool = False
    """A fit to BurstGPT's mean lengths replaces those of the trace; the built-in window has it."""
    format: str | None = None
    """Of the trace; told from its columns when None."""
    scale: float = 1.0
    rate: float = 8.0
    """Mean requests per second of the built-in window, before ``scale``."""
    start_s: float = 0.0
    end_s: float | None = None
    """The part of the trace that is replayed."""
    duration_s: float = 640.0
    """Of the built-in window."""
    spike_factor: float | None = None
    """Height of the built-in window's spikes over its base rate. None: 3.5 and 4.5."""
    max_total_tokens: int | None = None
    repeat: tuple[float, float, int] | None = None
    """(from, to, times): the extreme burst, this part of the trace again and again."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Experiment:
    """One comparison, at one or several loads."""

    setup: Setup = Setup()
    load: Load = Load()
    compare: tuple[str, ...] = ("recompute", "drop")
    sweep: tuple[float, ...] = ()
    """Values of ``load.scale``; empty: just the one."""
    title: str = "Simulation"
    claim: str = ""
    """What the paper says, for the report."""


def read_experiment(path: Path) -> Experiment:
    """An experiment from TOML; paths in it are relative to the file. Unknown keys are errors."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    _check_keys(path, values, Experiment)
    for name, kind in (("setup", Setup), ("load", Load)):
        _check_keys(path, values.get(name, {}), kind)
    try:
        experiment = msgspec.convert(
            values, Experiment, dec_hook=lambda kind, value: kind(value), strict=True
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
    load = experiment.load
    return dataclasses.replace(
        experiment,
        setup=dataclasses.replace(
            experiment.setup, profile=_beside(path, experiment.setup.profile)
        ),
        load=dataclasses.replace(
            load, trace=_beside(path, load.trace), lengths=_beside(path, load.lengths)
        ),
    )


def _check_keys(path: Path, values: object, kind: type) -> None:
    known = [field.name for field in dataclasses.fields(kind)]
    for key in values if isinstance(values, dict) else ():
        if key not in known:
            raise ConfigError(f"{path}: unknown setting {key!r}; there are: {', '.join(known)}")


def _beside(path: Path, other: Path | None) -> Path | None:
    return None if other is None else path.parent / other


def build_scenario(setup: Setup, load: Load) -> Scenario:
    """The scenario, or a ConfigError that says what is wrong with it."""
    _check_setup(setup)
    if load.seed < 0:
        raise ConfigError(f"seed must be at least 0, not {load.seed}")
    profile = _instance_profile(setup)
    workload = build_workload(_recipe(load))
    if load.repeat is not None:
        workload = _repeated(workload, *load.repeat)
    return Scenario(
        profile=profile,
        num_instances=setup.num_instances,
        workload=workload,
        scheduler=SchedulerConfig(
            setup.max_num_seqs,
            setup.max_num_batched_tokens,
            cost=profile_times(
                profile.times, profile.spec.num_layers, setup.max_num_batched_tokens
            ),
        ),
        world=WorldConfig(start_s=setup.start_s),
        kills=setup.kills,
        host_bytes=None if setup.host_gib is None else int(setup.host_gib * (1 << 30)),
        server=ServerConfig(
            max_num_queued_reqs=setup.max_num_queued_reqs,
            max_num_queued_tokens=setup.max_num_queued_tokens,
        ),
    )


_COUNTS = (
    "num_instances",
    "gpus_per_instance",
    "instance_mib",
    "block_size",
    "max_num_batched_tokens",
    "max_num_seqs",
)
"""Settings that are 1 at least."""


def _check_setup(setup: Setup) -> None:
    """What can be seen to be impossible before anything is built. Written so that NaN fails."""
    for name in _COUNTS:
        count = getattr(setup, name)
        if count is not None and count < 1:
            raise ConfigError(f"{name} must be at least 1, not {count}")
    if not 0.0 < setup.memory_utilization <= 1.0:
        raise ConfigError(f"memory_utilization must be in (0, 1], not {setup.memory_utilization}")
    if not 0.0 <= setup.stage_host_share <= 1.0:
        raise ConfigError(f"stage_host_share must be in [0, 1], not {setup.stage_host_share}")
    for name, amount in (("start_s", setup.start_s), ("host_gib", setup.host_gib)):
        if amount is not None and not 0.0 <= amount < math.inf:
            raise ConfigError(f"{name} must be at least 0 and finite, not {amount}")
    for time_s, instance in setup.kills:
        if not 0.0 <= time_s < math.inf:
            raise ConfigError(f"an instance dies at a time of at least 0 s, not at {time_s} s")
        if not 0 <= instance < setup.num_instances:
            raise ConfigError(
                f"no instance {instance} to kill: there are 0 to {setup.num_instances - 1}"
            )


def _instance_profile(setup: Setup) -> InstanceProfile:
    if setup.profile is not None:
        measured = read_profile(setup.profile)
        return cpu_profile(
            find_model(measured.subject.model),
            measured.serving,
            measured.alone,
            measured.subject.block_size,
            setup.instance_mib << 20,
        )
    return gpu_profile(
        find_model(setup.model),
        find_device(setup.device),
        setup.gpus_per_instance,
        memory_utilization=setup.memory_utilization,
        block_size=setup.block_size,
        stage_host_share=setup.stage_host_share,
    )


def _recipe(load: Load) -> Recipe:
    if not load.scale > 0:
        raise ConfigError(f"scale must be above 0, not {load.scale}")
    if load.trace is None:
        return Recipe(
            dataset=Dataset.BURSTY,
            request_rate=load.rate * load.scale,
            duration_s=load.duration_s,
            spike_factor=load.spike_factor,
            burstgpt_lengths=load.burstgpt_lengths,
            lengths_path=load.lengths,
            max_total_tokens=load.max_total_tokens,
            seed=load.seed,
        )
    return Recipe(
        dataset=_format_of(load),
        dataset_path=load.trace,
        lengths_path=load.lengths,
        burstgpt_lengths=load.burstgpt_lengths,
        spike_factor=load.spike_factor,
        trace_start_s=load.start_s,
        trace_end_s=load.end_s,
        trace_scale=max(1.0, load.scale),
        trace_keep_window=load.scale > 1.0,
        thin=min(1.0, load.scale),
        max_total_tokens=load.max_total_tokens,
        seed=load.seed,
    )


def _format_of(load: Load) -> Dataset:
    assert load.trace is not None
    if load.format is not None:
        traces = [dataset.value for dataset in Dataset if dataset.is_trace]
        if load.format not in traces:
            raise ConfigError(f"no trace format {load.format!r}; there are: {', '.join(traces)}")
        return Dataset(load.format)
    if ".json" in load.trace.name:
        return Dataset.TIMED_TRACE
    return Dataset.BURSTGPT if "burstgpt" in load.trace.name.lower() else Dataset.AZURE


def check_systems(labels: tuple[str, ...]) -> None:
    """Raise for a name that does not exist, before anything is simulated."""
    if not labels:
        raise ConfigError("nothing to compare: name at least one system")
    for label in labels:
        find_system(label)


def _repeated(workload: Workload, start_s: float, end_s: float, times: int) -> Workload:
    """The workload up to ``end_s``, then the part from ``start_s`` again and again."""
    if not 0.0 <= start_s < end_s or times < 1:
        raise ConfigError(f"repeat wants (from, to, times) with from < to, not {start_s, end_s}")
    requests = workload.requests()
    burst = [request for request in requests if start_s <= request.arrival_s < end_s]
    if not burst:
        raise ConfigError(f"repeat: no request arrives from {start_s:g} to {end_s:g} s")
    moments = [r.arrival_s for r in requests if r.arrival_s < end_s]
    inputs = [r.input_tokens for r in requests[: len(moments)]]
    outputs = [r.output_tokens for r in requests[: len(moments)]]
    for again in range(1, times):
        shift_s = again * (end_s - start_s)
        moments += [request.arrival_s + shift_s for request in burst]
        inputs += [request.input_tokens for request in burst]
        outputs += [request.output_tokens for request in burst]
    return Workload(
        tuple(moments),
        Lengths(tuple(inputs), tuple(outputs), workload.lengths.source),
        f"{workload.arrivals_source}, {start_s:g}-{end_s:g} s {times} times over",
    )
