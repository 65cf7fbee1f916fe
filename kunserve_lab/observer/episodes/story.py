"""An episode in words. Every figure in them was simulated or measured; none stands here."""

import enum
import math
import time

from kunserve_lab.compare.simulated.projection import HELPS
from kunserve_lab.observer.episodes.episode import Episode
from kunserve_lab.observer.episodes.what_if import (
    AS_IT_RAN,
    DROP,
    ENDLESS,
    FP8_KV,
    LEAST_LOAD,
    WAKE,
    WAKE_S,
    Judged,
    Measured,
    Outcome,
)

DOUBT = 0.3
"""Share by which the simulated P99 TTFT may miss the measured one before that is said."""
SHORT_SHARE = 0.2
"""Of an episode, how long a replica must have been short to be counted."""


class Cause(enum.StrEnum):
    """What an episode was short of."""

    MEMORY = "memory"
    """And a drop would have helped."""
    TOO_MUCH = "too much"
    """Memory, but a drop would not have been enough."""
    DISPATCH = "dispatch"
    """Some replicas had too much while others had room."""
    COMPUTE = "compute"
    UNKNOWN = "unknown"
    """Nothing was simulated."""


def cause_of(judged: Judged) -> Cause:
    """By what would have helped: endless memory, an even load, or neither."""
    found = judged.outcomes
    if AS_IT_RAN not in found or LEAST_LOAD not in found or ENDLESS not in found:
        return Cause.UNKNOWN
    ran, even = found[AS_IT_RAN].ttft_p99_s, found[LEAST_LOAD].ttft_p99_s
    if _helps(even, found[ENDLESS].ttft_p99_s):
        drop = found.get(DROP)
        return Cause.MEMORY if drop and _helps(ran, drop.ttft_p99_s) else Cause.TOO_MUCH
    return Cause.DISPATCH if _helps(ran, even) else Cause.COMPUTE


def sentence(judged: Judged) -> str:
    """What an operator must know, in one sentence."""
    episode, found, cause = judged.episode, judged.outcomes, cause_of(judged)
    when = f"{_clock(episode.begin_s)}-{_clock(episode.end_s)}"
    if cause is Cause.UNKNOWN:
        return f"{when}: {_short_of(episode)}; what would have helped is not known: " \
               f"{judged.why_not}"  # fmt: skip
    ran = found[AS_IT_RAN]
    if cause is Cause.COMPUTE:
        return (
            f"{when}: compute was short: more replicas, not drops; even endless memory would "
            f"{_hardly(ran.ttft_p99_s, found[ENDLESS].ttft_p99_s)}"
        )
    if cause is Cause.DISPATCH:
        even = found[LEAST_LOAD].ttft_p99_s
        return (
            f"{when}: {_short_of(episode)}, and the load was uneven: least-load dispatch alone "
            f"would have {_lowered(ran.ttft_p99_s, even)}"
        )
    short = f"{when}: {_short_of(episode)}, compute was not"
    if cause is Cause.TOO_MUCH:
        drop = found.get(DROP)
        rest = "more replicas or shorter answers"
        if drop is None:
            return f"{short}; one replica has no partner to drop layers with: {rest}"
        return f"{short}; yet a drop would {_hardly(ran.ttft_p99_s, drop.ttft_p99_s)}: {rest}"
    drop = found[DROP]
    lowered = _lowered(ran.ttft_p99_s, drop.ttft_p99_s)
    return f"{short}; a drop would have {lowered}, and {_tpot(ran, drop)}"


def comparison(judged: Judged) -> list[str]:
    """The other ways, and how far to trust all of it."""
    found = judged.outcomes
    if not found:
        return []
    others = []
    if LEAST_LOAD in found:
        others.append(f"least-load dispatch alone {_seconds(found[LEAST_LOAD].ttft_p99_s)}")
    if FP8_KV in found:
        others.append(f"fp8 KV {_seconds(found[FP8_KV].ttft_p99_s)} (where the answers allow it)")
    if WAKE in found:
        woken = found[WAKE].num_woken
        text = f"waking {woken} sleeping replica{'' if woken == 1 else 's'} in {WAKE_S:g} s each"
        text = text if woken else "with sleepers, of which none would have been woken,"
        others.append(f"{text} {_seconds(found[WAKE].ttft_p99_s)}")
    lines = [f"P99 TTFT otherwise: {'; '.join(others)}."]
    if judged.map is not None:
        lines.append(f"By the map: {judged.map.kind.value}.")
    return [*lines, trust(judged)]


def trust(judged: Judged) -> str:
    """The simulated burst beside the measured one."""
    alike, measured = judged.alike, judged.measured
    fitted = judged.factors.num_windows
    steps = f"corrected by {fitted} windows of the fleet" if fitted else "of the preset alone"
    text = f"Step times are {steps}"
    if judged.num_left_out:
        text += f"; {judged.num_left_out} requests were too many to simulate and left out"
    if alike is None or measured.ttft_p50_s is None or measured.ttft_p99_class_s is None:
        return f"{text}. The servers do not tell of TTFT: nothing to hold the simulation against."
    low_s, high_s = measured.ttft_p99_class_s
    text += (
        f". As it ran: P50 TTFT {_seconds(measured.ttft_p50_s)} measured, "
        f"{_seconds(alike.ttft_p50_s)} simulated; P99 {_number(low_s)} to {_seconds(high_s)} "
        f"measured (a class of the histogram), {_seconds(alike.ttft_p99_s)} simulated"
    )
    p99_s = alike.ttft_p99_s or 0.0
    if not low_s * (1 - DOUBT) <= p99_s <= high_s * (1 + DOUBT):
        text += "; they differ by more than a third: take the direction, not the figures"
    return f"{text}."


def as_json(judged: Judged) -> dict[str, object]:
    """The same for programs. Times in seconds; numbers that are not known are None."""
    episode = judged.episode
    return {
        "begin_s": episode.begin_s,
        "end_s": episode.end_s,
        "cause": cause_of(judged).value,
        "sentence": sentence(judged),
        "notes": comparison(judged),
        "memory_short_s": {name: round(s, 3) for name, s in episode.memory_s.items()},
        "compute_short_s": {name: round(s, 3) for name, s in episode.compute_s.items()},
        "drops_decided": episode.num_drops,
        "measured": _figures(judged.measured),
        "alike": None if judged.alike is None else _figures(judged.alike),
        "simulated": {way: _figures(one) for way, one in judged.outcomes.items()},
    }


def _figures(one: Measured | Outcome) -> dict[str, object]:
    values = {name: getattr(one, name) for name in one.__dataclass_fields__}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _helps(before_s: float, after_s: float) -> bool:
    return before_s >= HELPS * after_s


def _short_of(episode: Episode) -> str:
    """On how many replicas memory was short."""
    length_s = max(1.0, episode.end_s - episode.begin_s)
    num = sum(spent >= SHORT_SHARE * length_s for spent in episode.memory_s.values())
    num = num or len(episode.memory_s)
    return f"memory was short on {num} of {len(episode.replicas)} replicas"


def _lowered(before_s: float, after_s: float) -> str:
    return f"lowered P99 TTFT {_from_to(before_s, after_s)}"


def _hardly(before_s: float, after_s: float) -> str:
    if after_s < before_s:
        return f"have taken P99 TTFT only {_from_to(before_s, after_s)}"
    return f"not have lowered P99 TTFT ({_number(before_s)} s as it ran)"


def _from_to(before_s: float, after_s: float) -> str:
    return f"from about {_number(before_s)} to {_number(after_s)} s"


def _tpot(ran: Outcome, drop: Outcome) -> str:
    if not ran.tpot_p50_s > 0 or not drop.tpot_p50_s > 0:
        return "TPOT is not known"
    change = drop.tpot_p50_s / ran.tpot_p50_s - 1
    if abs(change) < 0.02:
        return "left P50 TPOT as it was"
    return f"{'raised' if change > 0 else 'lowered'} P50 TPOT by {abs(change):.0%}"


def _seconds(value_s: float | None) -> str:
    return "?" if value_s is None else f"{_number(value_s)} s"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _clock(moment_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment_s))
