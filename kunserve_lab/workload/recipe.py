"""From settings to a workload: what ``kunserve bench`` and experiment files ask for."""

import enum
from dataclasses import dataclass, field
from pathlib import Path

from kunserve.core.errors import ConfigError
from kunserve_lab.workload import lengths as lens
from kunserve_lab.workload import traces, transform
from kunserve_lab.workload.arrivals import gamma_arrivals, immediate_arrivals
from kunserve_lab.workload.bursty import BURSTINESS, SPIKES, WINDOW_S, bursty_workload, spikes_of
from kunserve_lab.workload.data.catalog import BURSTGPT_LIKE, locate
from kunserve_lab.workload.multi_turn import Conversation, conversations
from kunserve_lab.workload.workload import Lengths, Workload


class Dataset(enum.StrEnum):
    """Where a workload comes from."""

    RANDOM = "random"
    LENGTHS = "lengths"
    BURSTY = "bursty"
    MULTI_TURN = "multi-turn"
    BURSTGPT = "burstgpt"
    AZURE = "azure"
    MOONCAKE = "mooncake"
    TIMED_TRACE = "timed_trace"

    @property
    def is_trace(self) -> bool:
        """Whether the arrivals come from a file."""
        return self in (Dataset.BURSTGPT, Dataset.AZURE, Dataset.MOONCAKE, Dataset.TIMED_TRACE)


DEFAULT_NUM_PROMPTS = 1000


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make a workload. The defaults are vLLM's where vLLM has the setting."""

    dataset: Dataset = Dataset.RANDOM
    dataset_path: Path | None = None
    """The trace, or for ``lengths`` the CSV of lengths: a file, or a name of `workload.data`."""
    lengths_path: Path | None = None
    """A CSV, or a name, whose lengths replace those of the dataset, drawn with replacement."""
    num_prompts: int | None = None
    """Requests at most. None: 1000, or all that a trace or the bursty window has."""
    request_rate: float | None = None
    """Requests per second. None or infinite: all at once. Traces carry their own."""
    burstiness: float | None = None
    """Gamma shape of the gaps. None: 1, or 0.5 for the bursty window."""
    seed: int = 0
    random_input_tokens: int = 1024
    random_output_tokens: int = 128
    random_range_ratio: float = 0.0
    duration_s: float | None = None
    """Length of the bursty window. None: num_prompts / rate if both are given, else 640."""
    conversation: Conversation = field(default_factory=Conversation)
    """The shape of those of ``multi-turn``."""
    spike_factor: float | None = None
    """Height of the bursty window's spikes over its base rate. None: 3.5 and 4.5."""
    trace_start_s: float = 0.0
    trace_end_s: float | None = None
    """The part of the trace that is replayed, in the trace's own seconds."""
    trace_model: str | None = None
    """Only the rows of this model (BurstGPT)."""
    trace_time_scale: float = 1.0
    """Multiplies arrival times, after the window."""
    trace_scale: float = 1.0
    """TraceUpscaler's factor, after the window. Below 1 requests are left out, lengths and all."""
    trace_keep_window: bool = False
    """Whether upscaling covers the whole window instead of the original count."""
    thin: float = 1.0
    """Fraction of the requests kept, after scaling."""
    seconds_per_unit: float | None = None
    """Seconds per unit of a timed trace's ``timestamp``. None: 0.001 for mooncake, else 1."""
    max_total_tokens: int | None = None
    """input = min(input, this - output), the paper's rule for ShareGPT (4096)."""
    length_scale: float = 1.0
    """Multiplies every length, last."""


def build_workload(recipe: Recipe) -> Workload:
    """The workload that ``recipe`` describes. Equal recipes give equal workloads."""
    if recipe.num_prompts is not None and recipe.num_prompts < 1:
        raise ConfigError(f"num_prompts must be at least 1, not {recipe.num_prompts}")
    _refuse_what_does_not_apply(recipe)
    if recipe.dataset.is_trace:
        workload = _replayed(recipe)
    elif recipe.dataset is Dataset.BURSTY:
        workload = _bursty(recipe)
    elif recipe.dataset is Dataset.MULTI_TURN:
        count = DEFAULT_NUM_PROMPTS if recipe.num_prompts is None else recipe.num_prompts
        rate = 1.0 if recipe.request_rate is None else recipe.request_rate
        if not 0.0 < rate < float("inf"):
            raise ConfigError(f"conversations need a finite request_rate above 0, not {rate}")
        workload = conversations(recipe.conversation, count, rate, recipe.seed)
    else:
        workload = _drawn(recipe)
    if recipe.lengths_path is not None and recipe.dataset is not Dataset.LENGTHS:
        drawn = _lengths(recipe, recipe.lengths_path, len(workload))
        workload = transform.with_lengths(workload, drawn)
    elif recipe.max_total_tokens is not None and recipe.dataset is Dataset.BURSTY:
        workload = transform.with_lengths(workload, _capped(workload.lengths, recipe))
    elif recipe.max_total_tokens is not None and recipe.dataset is not Dataset.LENGTHS:
        raise ConfigError(
            "max_total_tokens applies to the bursty window and to lengths of a file (lengths_path)"
        )
    scaled = lens.scale_lengths(workload.lengths, recipe.length_scale)
    return transform.with_lengths(workload, scaled)


def _replayed(recipe: Recipe) -> Workload:
    workload = transform.window(_trace(recipe), recipe.trace_start_s, recipe.trace_end_s)
    workload = transform.scale_time(workload, recipe.trace_time_scale)
    if recipe.trace_scale < 1.0:
        workload = transform.thin(workload, recipe.trace_scale, recipe.seed)
    else:
        scale = transform.upscale_whole if recipe.trace_keep_window else transform.upscale
        workload = scale(workload, recipe.trace_scale, recipe.seed)
    workload = transform.thin(workload, recipe.thin, recipe.seed)
    if not len(workload):
        raise ConfigError(f"no request is left: {workload.arrivals_source}")
    if recipe.num_prompts is not None:
        workload = transform.first(workload, recipe.num_prompts)
    return workload


def _trace(recipe: Recipe) -> Workload:
    path = recipe.dataset_path
    if path is None:
        raise ConfigError(
            f"dataset {recipe.dataset} replays a file: give its path (dataset bursty needs none)"
        )
    match recipe.dataset:
        case Dataset.BURSTGPT:
            return traces.read_burstgpt(locate(path), recipe.trace_model)
        case Dataset.AZURE:
            return traces.read_azure(locate(path))
        case Dataset.MOONCAKE:
            default = traces.MOONCAKE_SECONDS_PER_UNIT
        case _:
            default = traces.TIMED_TRACE_SECONDS_PER_UNIT
    unit = default if recipe.seconds_per_unit is None else recipe.seconds_per_unit
    if not unit > 0:
        raise ConfigError(f"the seconds per unit of a timestamp must be above 0, not {unit}")
    return traces.read_timed_trace(locate(path), unit)


def _bursty(recipe: Recipe) -> Workload:
    rate = 1.0 if recipe.request_rate is None else recipe.request_rate
    duration_s = recipe.duration_s
    if duration_s is None and recipe.num_prompts is not None and recipe.request_rate is not None:
        duration_s = recipe.num_prompts / rate if rate > 0 else WINDOW_S
    burstiness = BURSTINESS if recipe.burstiness is None else recipe.burstiness
    window_s = WINDOW_S if duration_s is None else duration_s
    spikes = SPIKES if recipe.spike_factor is None else spikes_of(recipe.spike_factor)
    workload = bursty_workload(window_s, rate, recipe.seed, burstiness, spikes=spikes)
    if not len(workload):
        raise ConfigError(f"no request arrives within {window_s:g} s at {rate:g} requests/s")
    if recipe.num_prompts is not None:
        workload = transform.first(workload, recipe.num_prompts)
    return workload


def _drawn(recipe: Recipe) -> Workload:
    count = DEFAULT_NUM_PROMPTS if recipe.num_prompts is None else recipe.num_prompts
    if recipe.dataset is Dataset.LENGTHS:
        path = recipe.lengths_path or recipe.dataset_path
        if path is None:
            raise ConfigError("dataset lengths needs a CSV of input and output lengths")
        drawn = _lengths(recipe, path, count)
    else:
        drawn = lens.random_lengths(
            count,
            recipe.random_input_tokens,
            recipe.random_output_tokens,
            recipe.random_range_ratio,
            recipe.seed,
        )
    rate = recipe.request_rate
    if rate is None or _all_at_once(recipe):
        return Workload(immediate_arrivals(count), drawn, "all at once")
    burstiness = 1.0 if recipe.burstiness is None else recipe.burstiness
    process = "Poisson" if burstiness == 1.0 else f"Gamma (burstiness {burstiness:g})"
    arrivals = gamma_arrivals(count, rate, burstiness, recipe.seed)
    return Workload(arrivals, drawn, f"{process}, {rate:g} req/s, seed {recipe.seed}")


def _lengths(recipe: Recipe, path: Path, count: int) -> Lengths:
    """So many pairs of the file or data set."""
    if str(path) == BURSTGPT_LIKE:
        return _capped(lens.burstgpt_lengths(count, recipe.seed), recipe)
    pool = traces.read_lengths(locate(path))
    if recipe.max_total_tokens is not None:
        pool = lens.clip_total(pool, recipe.max_total_tokens)
    return lens.sample_lengths(pool, count, recipe.seed)


def _capped(drawn: Lengths, recipe: Recipe) -> Lengths:
    """Drawn lengths up to the recipe's bound, all of them."""
    if recipe.max_total_tokens is None:
        return drawn
    capped = lens.clip_total(drawn, recipe.max_total_tokens)
    if len(capped) < len(drawn):
        raise ConfigError(f"max_total_tokens {recipe.max_total_tokens}: an output alone is as long")
    return capped


def _refuse_what_does_not_apply(recipe: Recipe) -> None:
    """A setting that would be ignored is an error, not a surprise."""
    applies = _APPLIES[recipe.dataset]
    default = Recipe()
    given = [
        name
        for names in _APPLIES.values()
        for name in sorted(names)
        if name not in applies and getattr(recipe, name) != getattr(default, name)
    ]
    if given:
        hint = ": a trace replays its own arrivals" if recipe.dataset.is_trace else ""
        raise ConfigError(f"{given[0]} does not apply to dataset {recipe.dataset}{hint}")
    drawn = recipe.dataset in (Dataset.RANDOM, Dataset.LENGTHS)
    if drawn and _all_at_once(recipe) and recipe.burstiness is not None:
        raise ConfigError("burstiness needs a finite request_rate")


def _all_at_once(recipe: Recipe) -> bool:
    return recipe.request_rate is None or recipe.request_rate == float("inf")


_ARRIVALS = frozenset({"request_rate", "burstiness"})
_RANDOM = frozenset({"random_input_tokens", "random_output_tokens", "random_range_ratio"})
_TRACE = frozenset(
    {
        "dataset_path",
        "trace_start_s",
        "trace_end_s",
        "trace_time_scale",
        "trace_scale",
        "trace_keep_window",
        "thin",
    }
)
_APPLIES: dict[Dataset, frozenset[str]] = {
    Dataset.RANDOM: _ARRIVALS | _RANDOM,
    Dataset.LENGTHS: _ARRIVALS | {"dataset_path"},
    Dataset.BURSTY: _ARRIVALS | {"duration_s", "spike_factor"},
    Dataset.MULTI_TURN: frozenset({"request_rate", "conversation"}),
    Dataset.BURSTGPT: _TRACE | {"trace_model"},
    Dataset.AZURE: _TRACE,
    Dataset.MOONCAKE: _TRACE | {"seconds_per_unit"},
    Dataset.TIMED_TRACE: _TRACE | {"seconds_per_unit"},
}
"""The settings that only some datasets have. All others apply to every dataset."""
