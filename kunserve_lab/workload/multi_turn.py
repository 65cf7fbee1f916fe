"""Conversations: each turn's prompt is all that was said before, and something new.

All conversations begin with one system prompt. What a turn answers is a run of its own, because an
open loop sends a turn when its user would, whatever the server has answered by then.
"""

from dataclasses import dataclass

import numpy as np

from kunserve.core.errors import ConfigError
from kunserve_lab.workload import seeds
from kunserve_lab.workload.arrivals import gamma_arrivals
from kunserve_lab.workload.contents import Content
from kunserve_lab.workload.workload import Lengths, Workload

SYSTEM_RUN = 0
_RUNS_EACH = 1 << 20
"""Names of runs that a conversation has to itself."""
_LEAST_THINKING = 0.3
"""Of the mean time between turns: nobody answers at once."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The shape of every conversation."""

    turns: int = 10
    system_tokens: int = 500
    """Of the system prompt, which all have; 0: they share nothing."""
    turn_tokens: int = 50
    """What the user says in a turn."""
    answer_tokens: int = 100
    think_s: float = 10.0
    """Mean time from one turn to the next."""

    def __post_init__(self) -> None:
        """Lengths and times that make a conversation."""
        for name, least in (
            ("turns", 1),
            ("system_tokens", 0),
            ("turn_tokens", 1),
            ("answer_tokens", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.turns > _RUNS_EACH // 2:
            raise ConfigError(f"a conversation has at most {_RUNS_EACH // 2} turns")
        if not 0.0 <= self.think_s < float("inf"):
            raise ConfigError(f"think_s must be at least 0 and finite, not {self.think_s}")

    def content(self, number: int, turn: int) -> Content:
        """The prompt of a conversation's turn, counted from 0."""
        first = 1 + number * _RUNS_EACH
        names, sizes = [first], [self.turn_tokens]
        for past in range(turn):
            names += [first + 2 * past + 1, first + 2 * past + 2]
            sizes += [self.answer_tokens, self.turn_tokens]
        if self.system_tokens:
            names, sizes = [SYSTEM_RUN, *names], [self.system_tokens, *sizes]
        return Content(names, sizes)


def conversations(shape: Conversation, count: int, rate: float, seed: int) -> Workload:
    """The first ``count`` turns of conversations that begin at ``rate / turns`` per second."""
    num_begun = -(-count // shape.turns)
    begun_s = gamma_arrivals(num_begun, rate / shape.turns, 1.0, seed)
    rng = seeds.generator(seed, seeds.THINKING)
    gaps = rng.exponential(1.0 - _LEAST_THINKING, (num_begun, shape.turns)) + _LEAST_THINKING
    gaps[:, 0] = 0.0
    moments = np.array(begun_s)[:, None] + shape.think_s * np.cumsum(gaps, axis=1)
    order = np.argsort(moments, axis=None, kind="stable")[:count].tolist()
    turns = [divmod(index, shape.turns) for index in order]
    contents = tuple(shape.content(number, turn) for number, turn in turns)
    lengths = Lengths(
        tuple(content.num_tokens for content in contents),
        (shape.answer_tokens,) * len(contents),
        f"{shape.turns} turns of {shape.turn_tokens} in, {shape.answer_tokens} out behind a "
        f"system prompt of {shape.system_tokens}",
        contents,
    )
    source = (
        f"conversations, Poisson, {rate:g} turns/s, {shape.think_s:g} s between turns, seed {seed}"
    )
    return Workload(tuple(moments.ravel()[order].tolist()), lengths, source)
