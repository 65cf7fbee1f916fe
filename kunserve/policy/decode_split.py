"""Into how many microbatches a pipeline's decodes go, by what rounds of both ways took.

A round gives every decode a token. With a microbatch for each stage, stages compute side by side,
and every microbatch reads all weights. In a single one stages compute in turn, and a round reads
the weights once. Where stages share their memory, as instances on one host's CPUs do, and one of
them reads as fast as memory gives, side by side is no faster for few decodes: reading is all of
their time. From some number of decodes on arithmetic is, and it is done side by side.

That number depends on model, machine and neighbours, so it is found by trials, by bisection: rounds
of both ways in turns, at the number of decodes that there is. It is looked for again now and then.
"""

from dataclasses import dataclass, field
from statistics import median

ROUNDS = 4
"""Measured rounds of a way, before it is the other's turn."""
SKIPPED_ROUNDS = 1
"""After each change of the way: the pipeline drains or fills."""
TURNS = 2
"""Of each way in a trial: what disturbs one of them seldom disturbs both."""
ALIKE = 0.25
"""A trial goes on while the number of decodes is within this share of its beginning's."""
AGAIN_S = 10.0
"""Until a verdict is asked for again; twice as long each time that it stands."""
MOST_AGAIN_S = 80.0
BETTER = 0.97
"""A single microbatch must take this share of the other way's time at most: stages that compute
side by side have more to give when a prompt comes."""


@dataclass(slots=True)
class _Trial:
    """Rounds of both ways in turns, at about one number of decodes."""

    num_decodes: int
    ways: tuple[int, ...]
    """Microbatches of a round, turn by turn."""
    turn: int = 0
    num_notes: int = 0
    """Of this turn: a microbatch each."""
    seconds: dict[int, list[float]] = field(default_factory=dict)
    """Of rounds, by their way."""

    @property
    def way(self) -> int:
        """Whose turn it is."""
        return self.ways[self.turn]

    def is_about(self, num_decodes: int) -> bool:
        """Whether what is measured at that number belongs to the trial."""
        return abs(num_decodes - self.num_decodes) <= ALIKE * self.num_decodes

    def note(self, seconds: float) -> bool:
        """A microbatch of the turn's way took so long; whether the trial is over."""
        self.num_notes += 1
        if self.num_notes > SKIPPED_ROUNDS * self.way:
            self.seconds.setdefault(self.way, []).append(seconds)
        if self.num_notes >= (SKIPPED_ROUNDS + ROUNDS) * self.way:
            self.turn, self.num_notes = self.turn + 1, 0
        return self.turn == len(self.ways)


class DecodeSplit:
    """What a group has found out: up to how many decodes a single microbatch is faster."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._most_joined = 1
        """A single microbatch was faster with so many: one decode cannot be parted."""
        self._fewest_parted: int | None = None
        """A microbatch for each stage was faster with so many."""
        self._trial: _Trial | None = None
        self._ask_at_s = 0.0
        self._again_s = AGAIN_S

    @property
    def num_stages(self) -> int:
        """Of the group."""
        return self._num_stages

    @property
    def most_joined(self) -> int:
        """So many decodes, and fewer, go in one microbatch."""
        return self._most_joined

    def parts(self, num_decodes: int, now_s: float) -> int:
        """How many microbatches may be in flight, where nothing but decodes runs."""
        if self._trial is not None and not self._trial.is_about(num_decodes):
            self._trial = None
        if self._trial is None and num_decodes > 1 and self._asks(num_decodes, now_s):
            self._trial = _Trial(num_decodes, (1, self._num_stages) * TURNS)
        if self._trial is not None:
            return self._trial.way
        return 1 if num_decodes <= self._most_joined else self._num_stages

    def note(self, parts: int, num_decodes: int, seconds: float, now_s: float) -> None:
        """A microbatch of decodes came back so long after it was planned, and none of prompts was
        in flight with it. ``num_decodes`` are all of the group's, in ``parts`` microbatches.
        """
        trial = self._trial
        if trial is None or parts != trial.way or not trial.is_about(num_decodes):
            return
        if trial.note(seconds):
            self._trial = None
            joined_s, parted_s = median(trial.seconds[1]), median(trial.seconds[self._num_stages])
            self._learn(trial.num_decodes, joined_s <= BETTER * parted_s, now_s)

    def interrupt(self) -> None:
        """A prompt was in flight with a microbatch of decodes: this turn's round begins anew."""
        if self._trial is not None:
            self._trial.num_notes = 0

    def _asks(self, num_decodes: int, now_s: float) -> bool:
        """Whether it is not known which way suits so many, or time to look again."""
        is_known = num_decodes <= self._most_joined or (
            self._fewest_parted is not None and num_decodes >= self._fewest_parted
        )
        return not is_known or now_s >= self._ask_at_s

    def _learn(self, num_decodes: int, is_joined: bool, now_s: float) -> None:
        """The last verdict counts, whatever earlier ones said about such a number."""
        stood = (num_decodes <= self._most_joined) == is_joined
        self._again_s = min(2 * self._again_s, MOST_AGAIN_S) if stood else AGAIN_S
        self._ask_at_s = now_s + self._again_s
        if is_joined:
            self._most_joined = max(self._most_joined, num_decodes)
            if self._fewest_parted is not None:
                self._fewest_parted = max(self._fewest_parted, num_decodes + 1)
        else:
            self._most_joined = min(self._most_joined, num_decodes - 1)
            least = num_decodes if self._fewest_parted is None else self._fewest_parted
            self._fewest_parted = min(least, num_decodes)
