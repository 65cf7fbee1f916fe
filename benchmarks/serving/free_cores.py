"""A pipeline's trace, played again as if each stage had a core to itself.

On a machine that others use, a stage that waits for a core looks like one that computes, and its
peers wait for it. So bubbles on the clock say nothing. Here everything takes the processor time
that it took, begins in each stage in the order of the trace, and waits for what it needs: hidden
states of the stage before, final rows of the last one, all parts of the output head, and the
microbatch that was in flight before it. What is left of a stage's time is its own: what it does
between two works, and its waits for others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

STEP, HEAD, SAMPLE = "step", "head", "sample"


class Worked(Protocol):
    """What was computed: as ``pipeline_cost.Span``."""

    @property
    def instance(self) -> int: ...
    @property
    def part(self) -> str: ...
    @property
    def microbatch(self) -> str: ...
    @property
    def start_s(self) -> float: ...
    @property
    def cpu_s(self) -> float: ...


class Left(Protocol):
    """What was done before that: as ``pipeline_cost.Between``."""

    @property
    def instance(self) -> int: ...
    @property
    def until_s(self) -> float: ...
    @property
    def cpu_s(self) -> float: ...


@dataclass(slots=True)
class StageTime:
    """Where a stage's time would go."""

    works_s: float = 0.0
    beside_s: float = 0.0
    waits_s: float = 0.0
    end_s: float = 0.0

    @property
    def bubbles(self) -> float:
        """Share of the time in which it computes nothing."""
        return 1.0 - self.works_s / (self.works_s + self.beside_s + self.waits_s)


def play(
    works: Sequence[Worked], between: Sequence[Left], stages: Sequence[int], way_s: float
) -> list[StageTime]:
    """The time of each of ``stages``, instances in their order.

    ``works`` in order of their starts; a word from stage to stage takes ``way_s``.
    """
    beside_s = {(one.instance, one.until_s): one.cpu_s for one in between}
    ended_s: dict[tuple[str, str, int], float] = {}
    """By part, microbatch and instance."""
    sampled = {work.microbatch for work in works if work.part == HEAD}
    begun: list[str] = []
    """Microbatches in the order of the first stage."""
    times = {instance: StageTime() for instance in stages}
    for work in _in_order(works, stages):
        time, me, name = times[work.instance], work.instance, work.microbatch
        needed: list[tuple[str, str, int]] = []
        if work.part == SAMPLE:
            needed = [(HEAD, name, other) for other in stages]
        elif work.part == HEAD:
            needed = [(STEP, name, stages[-1])]
        elif me != stages[0]:
            needed = [(STEP, name, stages[stages.index(me) - 1])]
        else:
            begun.append(name)
            if len(begun) > len(stages):
                before = begun[-1 - len(stages)]
                is_sampled = before in sampled
                needed = [(SAMPLE, before, me) if is_sampled else (STEP, before, stages[-1])]
        there_s = max(
            (ended_s[key] + way_s * (key[2] != me) for key in needed if key in ended_s), default=0.0
        )
        own_s = beside_s.get((me, work.start_s), 0.0)
        waits_s = max(0.0, there_s - time.end_s)
        # What was cut off at the trace's beginning is no wait.
        time.waits_s += waits_s if time.works_s else 0.0
        time.beside_s += own_s if time.works_s else 0.0
        time.works_s += work.cpu_s
        time.end_s = max(time.end_s, there_s) + own_s + work.cpu_s
        ended_s[work.part, name, me] = time.end_s
    return [times[instance] for instance in stages]


def _in_order(works: Sequence[Worked], stages: Sequence[int]) -> list[Worked]:
    """As they began: what a work needs has ended before it, so it comes before it here."""
    return sorted((work for work in works if work.instance in stages), key=lambda w: w.start_s)
