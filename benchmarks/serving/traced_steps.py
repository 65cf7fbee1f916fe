"""Steps of a real server, read from the Chrome trace of ``serve --trace-out``."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from kunserve.core.cost import DENSE, CostCoefficients, ExpertChoice
from kunserve.policy.batch.cost import NARROW_TOKENS, Array
from kunserve_lab.profile.cost_forms import as_vector

CHUNKS_TERM = 2
"""Where ``TracedStep.features`` counts a batch's chunks."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One microbatch on one stage."""

    instance: int
    start_s: float
    end_s: float
    num_prompt_tokens: int
    num_decodes: int
    layers: tuple[int, int]
    features: tuple[float, ...]
    """As ``CostForm.features`` but for experts: the whole batch, the whole model."""

    @property
    def seconds(self) -> float:
        """How long it computed."""
        return self.end_s - self.start_s


def read_steps(path: Path) -> list[TracedStep]:
    """Every step, in order of their start."""
    events = msgspec.json.decode(path.read_bytes())["traceEvents"]
    steps = []
    for event in events:
        args = event.get("args", {})
        if event["ph"] != "X" or "pairs" not in args:
            continue
        num_tokens = args["prompt_tokens"] + args["decodes"]
        narrow = num_tokens <= NARROW_TOKENS
        features = (
            *(args["pairs"], 0 if narrow else num_tokens, args["chunks"], 1, args["context"]),
            *(0 if narrow else args["samples"], int(narrow)),
        )
        start_s = event["ts"] / 1e6
        steps.append(
            TracedStep(
                event["pid"],
                start_s,
                start_s + event["dur"] / 1e6,
                args["prompt_tokens"],
                args["decodes"],
                (args["layers"][0], args["layers"][1]),
                features,
            )
        )
    return sorted(steps, key=lambda step: step.start_s)


def num_layers_of(steps: list[TracedStep]) -> int:
    """Of the model."""
    return max(step.layers[1] for step in steps)


def rows_of(steps: list[TracedStep], experts: ExpertChoice = DENSE) -> Array:
    """[steps, terms]: a stage takes its share of the layers' terms, the last one the samples'."""
    num_layers = num_layers_of(steps)
    reads = [
        experts.reads(step.num_prompt_tokens + step.num_decodes, step.features[CHUNKS_TERM])
        for step in steps
    ]
    features = [(*step.features, num) for step, num in zip(steps, reads, strict=True)]
    rows = np.array(features, dtype=np.float64)
    layers = np.array([step.layers for step in steps], dtype=np.float64)
    shares = (layers[:, 1] - layers[:, 0]) / num_layers
    sampled = np.where(layers[:, 1] == num_layers, rows[:, 5], 0.0)
    rows *= shares[:, None]
    rows[:, 5] = sampled
    return rows


def predicted_s(cost: CostCoefficients, steps: list[TracedStep]) -> Array:
    """What each step should take."""
    return np.asarray(rows_of(steps, cost.experts) @ as_vector(cost))


def overlaps(steps: list[TracedStep]) -> Array:
    """For each step the share of its time in which other instances computed, 1 for each."""
    shares = np.zeros(len(steps))
    starts, ends = (np.array([getattr(s, name) for s in steps]) for name in ("start_s", "end_s"))
    owners = np.array([step.instance for step in steps])
    for instance in set(owners.tolist()):
        mine = owners == instance
        moments = np.stack((starts[mine], ends[mine]), axis=1).ravel()
        busy_s = np.stack((np.zeros(mine.sum()), ends[mine] - starts[mine]), axis=1).ravel()
        so_far_s = np.cumsum(busy_s)
        within_s = np.interp(ends, moments, so_far_s) - np.interp(starts, moments, so_far_s)
        shares += np.where(mine, 0.0, within_s / (ends - starts))
    return shares
