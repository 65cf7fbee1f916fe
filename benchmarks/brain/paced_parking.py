"""Parking paced by the reader: who has most seconds ahead of its reader makes way.

    python -m benchmarks.brain.paced_parking >> benchmarks/results/paced_parking.jsonl
    python -m benchmarks.brain.paced_parking --table

In the place of the turns of `--max-park-s`: a stream may be parked when it is so many seconds ahead
of a reader of four tokens a second, and comes back when its lead is nearly used. So it is parked
once for each lead that it gains. While a due stream waits for memory the queue stays open, or
(`closed`) nobody is admitted. Simulated; copies hide behind steps.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.brain.study import run_study
from benchmarks.paper.points import LONGBENCH_48, Named, Point, figures_of_run
from kunserve.control.group.parking import BEFORE_ALL, Parking, Return
from kunserve.control.group.sequence import Progress, Sequence
from kunserve.control.instance.work import Work
from kunserve.core.ids import RequestId
from kunserve.policy.batch.parking import RETURN_STEPS
from kunserve_lab.compare.simulated.scenario import Scenario
from kunserve_lab.compare.simulated.simulation import simulate
from kunserve_lab.compare.systems import find_system
from kunserve_lab.sim.by_time import TimedWorld
from kunserve_lab.sim.instance import SimInstance

BENCHMARK = "paced_parking"
POINTS = (
    LONGBENCH_48,
    Point("heavy weights 0.27, long", "heavy_weights_14b", 0.27, 32_768),
)
SEEDS = (5, 6)
TOKENS_PER_S = 4.0


@dataclass(frozen=True, slots=True)
class Pacing:
    """One rule."""

    least_lead_s: float
    """Who has less is not parked."""
    is_open: bool = True
    """Requests are admitted while a due stream waits."""


PACINGS = {
    "paced 5 s": Pacing(5.0),
    "paced 5 s, closed": Pacing(5.0, is_open=False),
    "paced 10 s, closed": Pacing(10.0, is_open=False),
}
VARIANTS = ("endless", "drop", "drop-park", *PACINGS)


class PacedParking(Parking):
    """In the place of a scheduler's `Parking`."""

    def __init__(self, given: Parking, world: "PacedWorld") -> None:
        super().__init__(
            given.max_park_s,
            given._step_s,
            given._link,
            given._blocks,
            given._ledger,
            given._waiting,
            given._swap,
            given._cache,
        )
        self._first_s = world.first_s
        self._pacing = world.pacing

    def lead_s(self, seq: Sequence, now_s: float) -> float:
        """Seconds of reading that the client has; below 0 it waits."""
        since_s = now_s if seq.streams_since_s is None else seq.streams_since_s
        began_s = self._first_s.setdefault(seq.request_id, since_s)
        return seq.num_output / TOKENS_PER_S - (now_s - began_s)

    def bring_back(self, running: Iterable[Sequence], room: int, now_s: float) -> Return:
        """Who has least to read comes first; who is due before anybody is admitted."""
        swap, pacing = self._swap, self._pacing
        running = list(running)
        runs = any(seq.state is Progress.RUNNING for seq in running)
        is_idle = not runs and swap.leaving_blocks == 0
        room -= len(swap.returning)
        away = sorted(swap.away, key=lambda one: self.lead_s(one[0], now_s))
        needed_s = RETURN_STEPS * self._step_s
        waiting: list[Sequence] = []
        for seq, _, num_blocks in away:
            needed_s += 2.0 * num_blocks / self._link.blocks_per_s
            is_due = self.lead_s(seq, now_s) <= needed_s
            kept_blocks = 0 if is_due or is_idle else self._waiting.num_blocks
            if room > 0 and swap.missing_blocks(seq) + kept_blocks <= 0 and not waiting:
                swap.bring_back(seq)
                room -= 1
            elif is_due:
                waiting.append(seq)
        victims: list[Sequence] = []
        if waiting:
            missing = sum(map(swap.missing_blocks, waiting)) - swap.leaving_blocks
            victims = self._choose(running, missing, 0, now_s)
        is_closed = bool(waiting) and not pacing.is_open
        return Return(len(swap.returning), BEFORE_ALL if is_closed else None, victims)

    def _choose(
        self, running: Iterable[Sequence], missing_blocks: int, priority: int, now_s: float
    ) -> list[Sequence]:
        """The fewest that free enough, most ahead first; as many as there are if not."""
        if missing_blocks <= 0:
            return []
        decodes, views = self._views(running, now_s)
        ahead = [
            (lead_s, index)
            for index, seq in enumerate(decodes)
            if (lead_s := self.lead_s(seq, now_s)) >= self._pacing.least_lead_s
        ]
        chosen = []
        for _, index in sorted(ahead, reverse=True):
            if missing_blocks <= 0:
                break
            chosen.append(decodes[index])
            missing_blocks -= views[index].num_blocks
        return chosen if missing_blocks <= 0 else []


class PacedWorld(TimedWorld):
    """Every scheduler that parks does it at the readers' pace."""

    def __init__(self, *args: Any, pacing: Pacing) -> None:
        self.pacing = pacing
        self.first_s: dict[RequestId, float] = {}
        """When each stream began, once somebody has asked."""
        super().__init__(*args)

    def begin_step(self, member: SimInstance) -> Work | None:
        """Whoever leads a group has the rule from its first step on."""
        membership = member.agent.membership
        if membership is not None and membership.scheduler is not None:
            holders: Any = membership.scheduler._holders
            if type(holders._parking) is Parking:
                holders._parking = PacedParking(holders._parking, self)
        return super().begin_step(member)


def run(variant: str, scenario: Scenario) -> Iterator[Named]:
    """One variant of one draw."""
    pacing = PACINGS.get(variant)
    if pacing is None:
        result = simulate(find_system(variant), scenario)
    else:
        paced = pacing

        def make_world(*args: Any) -> PacedWorld:
            return PacedWorld(*args, pacing=paced)

        result = simulate(find_system("drop-park"), scenario, make_world=make_world)
    yield from figures_of_run(result, scenario)
    yield "swapped out", result.swapped_out_bytes / 1e12, "TB"
    reader = next(one for one in result.metrics.readers if one.tokens_per_s == TOKENS_PER_S)
    yield "P99 visible stall", reader.stall_p99_s, "s"
    yield "late tokens", 100.0 * reader.late_share, "%"


def main() -> None:
    """Every rule at either load."""
    run_study(BENCHMARK, __doc__, POINTS, VARIANTS, SEEDS, run)


if __name__ == "__main__":
    main()
