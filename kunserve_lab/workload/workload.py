"""The value every experiment starts from."""

import math
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from kunserve.core.errors import ConfigError
from kunserve_lab.workload.contents import Content


class WorkloadRequest(NamedTuple):
    """One request of a workload: when it arrives, and how long it is."""

    number: int
    """Its place in the order of arrival, from 0."""
    arrival_s: float
    input_tokens: int
    output_tokens: int
    content: Content | None = None
    """What it has in common with others; None: nothing."""
    priority: int = 0
    """The lower, the sooner it is served."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Pairs of (input, output) token counts, and where they come from."""

    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    source: str
    """For people: shown on figures and stored with every result."""
    contents: tuple[Content | None, ...] | None = None
    """Of each prompt; None: no two prompts have anything in common."""
    priorities: tuple[int, ...] | None = None
    """Of each request; None: all are equal."""

    def __post_init__(self) -> None:
        assert len(self.input_tokens) == len(self.output_tokens), (
            len(self.input_tokens),
            len(self.output_tokens),
        )
        assert min(self.input_tokens, default=1) >= 1, min(self.input_tokens)
        assert min(self.output_tokens, default=1) >= 1, min(self.output_tokens)
        assert self.contents is None or len(self.contents) == len(self), len(self.contents)
        assert self.priorities is None or len(self.priorities) == len(self), len(self.priorities)

    def __len__(self) -> int:
        return len(self.input_tokens)

    @property
    def mean_input_tokens(self) -> float:
        """Mean input length; 0 when there is no pair."""
        return sum(self.input_tokens) / max(1, len(self))

    @property
    def mean_output_tokens(self) -> float:
        """Mean output length; 0 when there is no pair."""
        return sum(self.output_tokens) / max(1, len(self))

    def take(self, count: int) -> "Lengths":
        """The first ``count`` pairs, starting over when there are fewer."""
        if count <= len(self):
            return replace(
                self,
                input_tokens=self.input_tokens[:count],
                output_tokens=self.output_tokens[:count],
                contents=None if self.contents is None else self.contents[:count],
                priorities=self.priorities and self.priorities[:count],
            )
        if not len(self):
            raise ConfigError(f"no lengths to draw from ({self.source})")
        rounds = -(-count // len(self))
        return replace(
            self,
            input_tokens=(self.input_tokens * rounds)[:count],
            output_tokens=(self.output_tokens * rounds)[:count],
            contents=self._contents_again(rounds, count),
            priorities=self.priorities and (self.priorities * rounds)[:count],
        )

    def _contents_again(self, rounds: int, count: int) -> tuple[Content | None, ...] | None:
        """Each round is of other users, who share nothing with those of another."""
        contents = self.contents
        if contents is None:
            return None
        every = (
            None if one is None else one.again(times) for times in range(rounds) for one in contents
        )
        return tuple(islice(every, count))


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival. Time 0 is the start of the experiment.

    Promises: ``arrival_s`` never decreases, is finite and at least 0, and has one entry per
    pair of ``lengths``.
    """

    arrival_s: tuple[float, ...]
    lengths: Lengths
    arrivals_source: str
    """For people: where the arrival times come from and what was done to them."""

    def __post_init__(self) -> None:
        assert len(self.arrival_s) == len(self.lengths), (len(self.arrival_s), len(self.lengths))
        previous = 0.0
        for moment in self.arrival_s:
            assert math.isfinite(moment) and moment >= previous, (moment, previous)
            previous = moment

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def input_tokens(self) -> tuple[int, ...]:
        """Input length of each request."""
        return self.lengths.input_tokens

    @property
    def output_tokens(self) -> tuple[int, ...]:
        """Output length of each request."""
        return self.lengths.output_tokens

    @property
    def provenance(self) -> str:
        """One line that says where arrivals and lengths come from."""
        return f"arrivals: {self.arrivals_source}; lengths: {self.lengths.source}"

    @property
    def duration_s(self) -> float:
        """Moment of the last arrival; 0 when there is none."""
        return self.arrival_s[-1] if self.arrival_s else 0.0

    def requests(self) -> list[WorkloadRequest]:
        """The requests in order of arrival, numbered from 0."""
        contents = self.lengths.contents or (None,) * len(self)
        priorities = self.lengths.priorities or (0,) * len(self)
        columns = (self.arrival_s, self.input_tokens, self.output_tokens, contents, priorities)
        return [
            WorkloadRequest(number, *values)
            for number, values in enumerate(zip(*columns, strict=True))
        ]
