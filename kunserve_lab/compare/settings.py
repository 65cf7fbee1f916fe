"""What an experiment asks for: the cluster of either world, and the workload."""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

from kunserve.core.errors import ConfigError
from kunserve_lab.workload.bursty import burst_arrivals
from kunserve_lab.workload.data.catalog import BURSTGPT_LIKE
from kunserve_lab.workload.multi_turn import Conversation
from kunserve_lab.workload.recipe import Dataset, Recipe, build_workload
from kunserve_lab.workload.workload import Lengths, Workload


@dataclass(frozen=True, slots=True)
class SimulatedSetup:
    """The cluster of the simulated world."""

    model: str = "Qwen/Qwen2.5-14B"
    device: str = "a800"
    num_instances: int = 8
    topology: Path | None = None
    """A file that says where each instance stands (`cluster.topology`). None: all on one host."""
    gpus_per_instance: int | None = None
    """None: as in the paper's table of models."""
    profile: Path | None = None
    """A file of ``kunserve profile``: CPU instances of its model instead of GPUs."""
    instance_mib: int = 785
    """Memory of such an instance."""
    memory_utilization: float = 0.9
    """Share of the GPU memory for weights and KV."""
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
class RealSetup:
    """The servers of the real world: one ``kunserve serve`` per run."""

    model: str = "smollm2-135m"
    num_instances: int = 2
    instance_memory: str = "367MiB"
    """For weights and KV together. The built-in model's weights take 70 % of 367 MiB."""
    max_num_batched_tokens: int = 256
    num_threads: int = 1
    """Compute threads of each instance."""
    profile: Path | None = None
    """A file of ``kunserve profile``. None: what ``kunserve serve`` finds."""
    serve_flags: tuple[str, ...] = ()
    """Further flags of every server."""
    num_warmups: int = 2
    """Requests sent and finished before the clock starts."""
    timeout_s: float = 3600.0
    """A request that takes longer has failed."""


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """The requests. A run's load multiplies their rate and keeps their pattern."""

    trace: Path | None = None
    """A trace with arrivals: a file, or a data set's name. None: the built-in bursty window."""
    lengths: Path | None = None
    """A CSV or a data set whose lengths replace those of the trace."""
    format: str | None = None
    """Of the trace; told from its name when None."""
    rate: float = 8.0
    """Mean requests per second of the built-in window at load 1."""
    start_s: float = 0.0
    end_s: float | None = None
    """The part of the trace that is replayed."""
    duration_s: float = 400.0
    """Of the built-in window: long enough that its spikes fill the memory of a GPU."""
    spike_factor: float | None = None
    """Height of the built-in window's spikes over its base rate. None: 3.5 and 4.5."""
    max_total_tokens: int | None = None
    """Inputs of ``lengths`` are cut so that input + output fits."""
    length_scale: float = 1.0
    """Multiplies every length, for small models."""
    turns: int | None = None
    """Of conversations, without a trace: ``rate`` turns per second for ``duration_s``. None: the
    bursty window."""
    system_tokens: int = 500
    """Of these conversations; as are the next three."""
    turn_tokens: int = 50
    answer_tokens: int = 100
    think_s: float = 10.0
    repeat: tuple[float, float, int] | None = None
    """(from, to, times): the extreme burst, this part of the trace again and again."""
    burst_s: float | None = None
    """Length of one burst in Poisson arrivals, without a trace. A load is then its height in X, and
    ``rate`` is X: what the cluster sustains when its memory is full (`simulated.full_rate`)."""
    base: float = 0.6
    """Rate before and after that burst, in X."""
    before_s: float = 45.0
    """Of base rate before it."""
    after_s: float = 60.0
    """And behind it."""


def workload_of(settings: WorkloadSettings, load: float, seed: int) -> Workload:
    """The requests at one load. Equal arguments give equal requests."""
    if not load > 0:
        raise ConfigError(f"a load must be above 0, not {load}")
    if seed < 0:
        raise ConfigError(f"a seed must be at least 0, not {seed}")
    if settings.burst_s is not None:
        return _one_burst(settings, load, seed)
    workload = build_workload(_recipe(settings, load, seed))
    return workload if settings.repeat is None else _repeated(workload, *settings.repeat)


def lengths_of(settings: WorkloadSettings, count: int, seed: int) -> Lengths:
    """So many pairs of lengths, without arrivals."""
    recipe = Recipe(
        dataset=Dataset.LENGTHS,
        dataset_path=settings.lengths or Path(BURSTGPT_LIKE),
        num_prompts=count,
        max_total_tokens=settings.max_total_tokens,
        length_scale=settings.length_scale,
        seed=seed,
    )
    return build_workload(recipe).lengths


def digest_of(setup: object, system: object, workload: Workload) -> str:
    """Twelve hexadecimal digits that differ when anything that a run depends on differs.

    The requests themselves count, not the files they come from. Of a file that ``setup`` names
    the content counts.
    """
    values: dict[str, object] = {
        "setup": _plain(setup),
        "system": _counting(_plain(system)),
        "requests": [workload.arrival_s, workload.input_tokens, workload.output_tokens],
    }
    if workload.lengths.contents is not None:
        values["contents"] = list(map(repr, workload.lengths.contents))
    if workload.lengths.priorities is not None:
        values["priorities"] = workload.lengths.priorities
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


_LATER = {
    "keeps_ring": False,
    "reserves_prompts": True,
    "max_num_queued_reqs": None,
    "joined_instances": 1,
    "hides_host_copies": True,
    "shares_weights": False,
}
"""Settings of systems that came later, and the values with which nothing is otherwise."""


def _counting(system: dict[str, object]) -> dict[str, object]:
    """What runs depend on."""
    return {
        key: value
        for key, value in system.items()
        if key not in ("name", "description") and not (key in _LATER and value == _LATER[key])
    }


def _plain(value: object) -> dict[str, object]:
    """The fields of a dataclass; a path becomes the digest of its file."""
    assert dataclasses.is_dataclass(value) and not isinstance(value, type), value
    return {name: _content(item) for name, item in dataclasses.asdict(value).items()}


def _content(value: object) -> object:
    if not isinstance(value, Path):
        return value
    try:
        return hashlib.sha256(value.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read {value}: {error.strerror}") from None


def _recipe(settings: WorkloadSettings, load: float, seed: int) -> Recipe:
    shared = Recipe(
        spike_factor=settings.spike_factor,
        lengths_path=settings.lengths,
        max_total_tokens=settings.max_total_tokens,
        length_scale=settings.length_scale,
        seed=seed,
    )
    if settings.trace is None and settings.turns is not None:
        return dataclasses.replace(
            shared,
            dataset=Dataset.MULTI_TURN,
            request_rate=settings.rate * load,
            num_prompts=max(1, round(settings.rate * load * settings.duration_s)),
            conversation=Conversation(
                settings.turns,
                settings.system_tokens,
                settings.turn_tokens,
                settings.answer_tokens,
                settings.think_s,
            ),
        )
    if settings.trace is None:
        return dataclasses.replace(
            shared,
            dataset=Dataset.BURSTY,
            request_rate=settings.rate * load,
            duration_s=settings.duration_s,
        )
    return dataclasses.replace(
        shared,
        dataset=_format_of(settings.trace, settings.format),
        dataset_path=settings.trace,
        trace_start_s=settings.start_s,
        trace_end_s=settings.end_s,
        trace_scale=max(1.0, load),
        trace_keep_window=load > 1.0,
        thin=min(1.0, load),
    )


def _one_burst(settings: WorkloadSettings, height: float, seed: int) -> Workload:
    """Poisson arrivals with one burst of ``height`` times X."""
    length_s, before_s, after_s = settings.burst_s, settings.before_s, settings.after_s
    assert length_s is not None
    if settings.trace is not None or settings.turns is not None or settings.repeat is not None:
        raise ConfigError("burst_s draws its arrivals: it does not go with a trace or with turns")
    for name, value in (("burst_s", length_s), ("base", settings.base), ("before_s", before_s),
                        ("after_s", after_s), ("rate", settings.rate)):  # fmt: skip
        if not 0.0 < value < math.inf:
            raise ConfigError(f"{name} must be above 0 and finite, not {value}")
    base_rate, burst_rate = settings.base * settings.rate, height * settings.rate
    arrivals = burst_arrivals(base_rate, burst_rate, before_s, length_s, after_s, seed)
    if not arrivals:
        raise ConfigError(f"no request arrives at {settings.rate:g} requests/s")
    source = (
        f"drawn: {height:g} X for {length_s:g} s, {before_s:g} s at {settings.base:g} X before and "
        f"{after_s:g} s behind, X = {settings.rate:g} requests/s, Poisson, seed {seed}"
    )
    return Workload(arrivals, lengths_of(settings, len(arrivals), seed), source)


def _format_of(trace: Path, given: str | None) -> Dataset:
    if given is not None:
        traces = [dataset.value for dataset in Dataset if dataset.is_trace]
        if given not in traces:
            raise ConfigError(f"no trace format {given!r}; there are: {', '.join(traces)}")
        return Dataset(given)
    if ".json" in trace.name:
        return Dataset.TIMED_TRACE
    return Dataset.BURSTGPT if "burstgpt" in trace.name.lower() else Dataset.AZURE


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
