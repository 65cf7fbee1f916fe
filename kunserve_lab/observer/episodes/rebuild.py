"""A burst's requests, from what the servers counted: how many came when, and how long they were.

Arrivals are exact to the distance of two readings, in which they are spread by chance. Lengths are
drawn from the histograms of those who ended in that time. Prompts then follow the tokens that were
counted as they began, in order of arrival; which answer was whose no server tells, so answers are
given by chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kunserve_lab.observer.episodes.episode import Episode, span_s
from kunserve_lab.observer.readings.change import Change, together
from kunserve_lab.workload import seeds
from kunserve_lab.workload.workload import Lengths, Workload

Ints = npt.NDArray[np.int64]

MOST_REQUESTS = 20_000
"""Of an episode; of a larger one every so many-th is left out, and the figures say so."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """An episode's requests. Time 0 is the first reading that was kept."""

    workload: Workload
    replicas: tuple[int, ...]
    """Which replica got each request, as a place in `Episode.replicas`."""
    begin_s: float
    """Of the episode, since time 0: those who came before only fill the replicas."""
    num_left_out: int = 0

    def of_replica(self, place: int) -> Workload:
        """What one replica got."""
        chosen = [at for at, replica in enumerate(self.replicas) if replica == place]
        lengths = self.workload.lengths
        return Workload(
            tuple(self.workload.arrival_s[at] for at in chosen),
            Lengths(
                tuple(lengths.input_tokens[at] for at in chosen),
                tuple(lengths.output_tokens[at] for at in chosen),
                lengths.source,
            ),
            self.workload.arrivals_source,
        )


def rebuild(episode: Episode, longest_tokens: int, seed: int = 0) -> Rebuilt:
    """The requests of an episode, none longer than ``longest_tokens``."""
    rng = seeds.generator(seed, seeds.LENGTHS)
    start_s = span_s(episode.changes)[0]
    came: list[tuple[float, int]] = []
    for place, name in enumerate(episode.replicas):
        own = [change for change in episode.changes if change.replica == name]
        came += [(moment, place) for moment in _arrivals(own, start_s, rng)]
    came.sort()
    num_left_out = max(0, len(came) - MOST_REQUESTS)
    if num_left_out:
        kept = np.linspace(0, len(came) - 1, MOST_REQUESTS).astype(int)
        came = [came[at] for at in kept]
    inputs, outputs = _lengths(episode.changes, len(came), rng)
    if not num_left_out:
        _follow(episode, [place for _, place in came], inputs)
    outputs = np.minimum(outputs, max(1, longest_tokens - 2))
    inputs = np.clip(inputs, 1, longest_tokens - outputs - 1)
    workload = Workload(
        tuple(moment for moment, _ in came),
        Lengths(
            tuple(inputs.tolist()),
            tuple(outputs.tolist()),
            "histograms of the fleet",
        ),
        "counted by the fleet",
    )
    places = tuple(place for _, place in came)
    return Rebuilt(workload, places, max(0.0, episode.begin_s - start_s), num_left_out)


def _arrivals(changes: Sequence[Change], start_s: float, rng: np.random.Generator) -> list[float]:
    """Moments at which requests came to one replica. Those that it had when it was first read
    came, one after the other, in the time between its first two readings.
    """
    moments: list[float] = []
    owed = 0
    for place, change in enumerate(changes):
        owed += change.more + (round(change.before.num_inside) if place == 0 else 0)
        number = max(0, owed)
        owed -= number
        begin_s = change.before.time_s - start_s
        drawn = begin_s + change.elapsed_s * rng.random(number)
        moments += np.maximum(0.0, drawn).tolist()
    return moments


def _lengths(changes: Sequence[Change], number: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Of so many prompts and answers, in an order by chance."""
    pair: list[Ints] = []
    for name, counter in (("input_tokens", "prompt_tokens"),
                          ("output_tokens", "generation_tokens")):  # fmt: skip
        counted = together(changes, name)
        if counted is not None and counted.count > 0:
            values = counted.draw(number)
        else:
            tokens = sum(one.amounts.get(counter, 0.0) for one in changes)
            ended = sum(one.amounts.get("finished", 0.0) for one in changes)
            values = np.full(number, tokens / max(1.0, ended))
        pair.append(rng.permutation(np.maximum(1, np.rint(values)).astype(np.int64)))
    return pair[0], pair[1]


def _follow(episode: Episode, places: Sequence[int], inputs: Ints) -> None:
    """Scale prompts, so that those who began between two readings have the tokens counted then."""
    for place, name in enumerate(episode.replicas):
        queue = [at for at, replica in enumerate(places) if replica == place]
        own = [change for change in episode.changes if change.replica == name]
        began = round(own[0].before.num_running) if own else 0  # before the first reading
        for change in own:
            first = change.histograms.get("ttft")
            number = 0 if first is None else round(first.count)
            who = queue[began : began + number]
            began += number
            tokens = change.amounts.get("prompt_tokens", 0.0)
            if who and len(who) == number and tokens > 0:
                inputs[who] = np.maximum(1, np.rint(inputs[who] * (tokens / inputs[who].sum())))
