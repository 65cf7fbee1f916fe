"""What the fleet's replicas are made of: a preset or a profile, with the memory that they report,
and step times corrected by those that they show.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kunserve.core.errors import ConfigError, KunServeError
from kunserve.core.ids import RequestId
from kunserve.core.step import Chunk
from kunserve.model.config import read_spec
from kunserve.model.profile import read_profile
from kunserve.model.source import resolve_model
from kunserve_lab.observer.readings.change import Change, together
from kunserve_lab.observer.readings.page import Reading
from kunserve_lab.observer.settings import Made
from kunserve_lab.sim.costs import cpu_profile
from kunserve_lab.sim.devices import find_device
from kunserve_lab.sim.models import SimModel, find_model, from_spec
from kunserve_lab.sim.profile import InstanceProfile, StepTimes, gpu_profile

WINDOW_S = 5.0
"""Of readings that are taken together: a prompt may be counted a second after its work."""
LEAST_WINDOWS = 3
"""With fewer a preset's step times stand as they are."""
PRIOR_WEIGHT = 0.1
"""Of the one common factor, against all windows, where two factors are sought."""
LEAST_FACTOR, MOST_FACTOR = 0.02, 50.0
_NOBODY = RequestId("nobody")


@dataclass(frozen=True, slots=True)
class Factors:
    """Step times of the fleet over those of its preset."""

    decode: float = 1.0
    prompt: float = 1.0
    num_windows: int = 0
    """That they were fitted to; 0: none, the preset stands."""


class FleetTimes:
    """Implements ``StepTimes``: those of a preset, decodes and prompts each times a factor."""

    def __init__(self, times: StepTimes, factors: Factors) -> None:
        self._times = times
        self._factors = factors

    def stage_s(self, chunks: Sequence[Chunk], num_layers: int, is_last: bool) -> float:
        """See ``StepTimes``."""
        factors = self._factors
        whole_s = self._times.stage_s(chunks, num_layers, is_last)
        decodes = [chunk for chunk in chunks if chunk[2] == 1]
        if len(decodes) == len(chunks):
            return whole_s * factors.decode
        if not decodes:
            return whole_s * factors.prompt
        decode_s = min(whole_s, self._times.stage_s(decodes, num_layers, is_last))
        return decode_s * factors.decode + (whole_s - decode_s) * factors.prompt


def preset_of(made: Made, reading: Reading) -> InstanceProfile:
    """A replica of the fleet by its preset, with the KV memory that it reports.

    Raises ConfigError, which says which flag is missing.
    """
    size = reading.block_size
    if made.profile is not None:
        measured = read_profile(made.profile)
        model = _model(made.model or measured.subject.model)
        plenty = 2 * model.weights_bytes + reading.capacity_tokens * model.num_layers * 65536
        profile = cpu_profile(model, measured.serving, measured.alone, size, plenty)
    else:
        model = _model(made.model or reading.model)
        device = find_device(made.device)
        profile = gpu_profile(
            model, device, made.gpus_per_instance, memory_utilization=0.95, block_size=size
        )
    return with_memory(profile, reading.capacity_blocks)


def with_memory(profile: InstanceProfile, capacity_blocks: int) -> InstanceProfile:
    """The same with so many blocks of KV beside whole weights."""
    spec = profile.spec
    weights_bytes = spec.memory_bytes - spec.kv_units * spec.unit_bytes
    kv_units = max(1, capacity_blocks) * spec.num_layers
    memory_bytes = weights_bytes + kv_units * spec.unit_bytes
    return replace(profile, spec=replace(spec, kv_units=kv_units, memory_bytes=memory_bytes))


def corrected(profile: InstanceProfile, factors: Factors) -> InstanceProfile:
    """The same with the fleet's own step times, in which what shares a replica's machine has its
    part.
    """
    return replace(profile, times=FleetTimes(profile.times, factors), times_alone=None)


def fit_factors(profile: InstanceProfile, changes: Iterable[Change], max_tokens: int) -> Factors:
    """How much slower the fleet is than its preset: at decodes, and at prompts beside them.

    Each window of a busy replica gives how many steps it made, how many requests decoded in them,
    how long those were, and how many tokens of prompts came. The factors are those by which the
    preset takes as long as the windows did.
    """
    found = [
        row for window in _windows(changes) for row in [_row(profile, window, max_tokens)] if row
    ]
    if len(found) < LEAST_WINDOWS:
        return Factors()
    rows = np.array(found)
    parts, elapsed_s = rows[:, :2], rows[:, 2]
    common = float(elapsed_s.sum() / parts.sum())
    # Weighted so that one factor alone would be that of all time together.
    weights = 1.0 / np.sqrt(parts.sum(axis=1))
    prior = np.eye(2) * np.sqrt(PRIOR_WEIGHT * (parts**2 * weights[:, None] ** 2).sum(axis=0))
    left = np.vstack([parts * weights[:, None], prior])
    right = np.concatenate([elapsed_s * weights, common * prior.sum(axis=1)])
    decode, prompt = np.clip(np.linalg.lstsq(left, right, rcond=None)[0], LEAST_FACTOR, MOST_FACTOR)
    return Factors(float(decode), float(prompt), len(rows))


def _windows(changes: Iterable[Change]) -> Iterator[list[Change]]:
    """Of `WINDOW_S` at least, in which a replica was never seen idle: else steps are not known."""
    open_windows: dict[str, list[Change]] = {}
    for change in changes:
        window = open_windows.setdefault(change.replica, [])
        if min(change.before.num_running, change.after.num_running) < 1 or change.began_anew:
            window.clear()
            continue
        window.append(change)
        if sum(one.elapsed_s for one in window) >= WINDOW_S:
            yield open_windows.pop(change.replica)


def _row(
    profile: InstanceProfile, window: Sequence[Change], max_tokens: int
) -> tuple[float, float, float] | None:
    """Seconds of decodes and of prompts by the preset, and of the window as it was."""
    gaps, elapsed_s = together(window, "itl"), sum(one.elapsed_s for one in window)
    if gaps is None or gaps.count < 1 or gaps.total <= 0:
        return None
    decoding = gaps.total / elapsed_s  # Little's law: gaps that are open at any one time
    num_steps = gaps.count / decoding
    running = sum(one.after.num_running for one in window)
    used = sum(one.after.kv_usage * one.after.capacity_tokens for one in window)
    context = max(1, int(used / max(1.0, running)))
    decodes = [Chunk(_NOBODY, context, 1, True)] * max(1, round(decoding))
    layers = profile.spec.num_layers
    decode_s = profile.times.stage_s(decodes, layers, True)
    inputs = together(window, "input_tokens")
    lump = int(max(2.0, min(max_tokens, (inputs.mean if inputs else None) or max_tokens)))
    both_s = profile.times.stage_s([*decodes, Chunk(_NOBODY, 0, lump, True)], layers, True)
    num_lumps = sum(one.amounts.get("prompt_tokens", 0.0) for one in window) / lump
    return num_steps * decode_s, num_lumps * (both_s - decode_s), elapsed_s


def _model(name: str) -> SimModel:
    """Built in, or by the description in a folder."""
    try:
        return find_model(name)
    except ConfigError as unknown:
        path = Path(name).expanduser()
        if not name or not path.exists():
            raise ConfigError(
                f"what model {name!r} is made of is not known. Give --model: a folder or .gguf "
                f"file of it, or a name that `kunserve simulate --list` shows ({unknown})"
            ) from None
    try:
        return from_spec(read_spec(resolve_model(str(path)), "bfloat16"))
    except KunServeError as error:
        raise ConfigError(f"--model {name}: {error}") from None
