"""Small scenarios whose every command is kept: what each must show, whatever else changes."""

from dataclasses import dataclass

from kunserve_lab.compare.simulated.scenario import Scenario
from kunserve_lab.sim.by_time import WorldConfig
from kunserve_lab.workload.workload import Lengths, Workload
from tests.lab.sim.worlds import scenario, small_profile

Size = tuple[float, int, int]
"""(arrival in seconds, input tokens, output tokens)."""


@dataclass(frozen=True, slots=True)
class Story:
    """One scenario under one system."""

    system: str
    scenario: Scenario
    shows: tuple[str, ...]
    """Parts of lines of the log, in this order: without them the story is not told."""


def _workload(*requests: Size) -> Workload:
    ordered = sorted(requests)
    lengths = Lengths(tuple(r[1] for r in ordered), tuple(r[2] for r in ordered), "told")
    return Workload(tuple(r[0] for r in ordered), lengths, "told")


def _every(gap_s: float, num: int, tokens: tuple[int, int], start_s: float = 0.0) -> list[Size]:
    return [(start_s + index * gap_s, *tokens) for index in range(num)]


_BURST = _every(0.1, 40, (1000, 100))
_TRICKLE = _every(1.0, 12, (200, 20), 10.0)

STORIES = {
    "drop_and_restore": Story(
        "drop",
        scenario(_workload(*_BURST, *_TRICKLE)),
        ("announce drop 0 done", "announce restore 1 done"),
    ),
    "two_drops": Story(
        "drop",
        scenario(_workload(*_every(0.04, 110, (1000, 100))), 4),
        ("announce drop 0 done", "announce drop 1 done"),
    ),
    "death_in_exchange": Story(
        "drop",
        scenario(
            _workload(*_BURST),
            world=WorldConfig(start_s=3.0, detect_s=0.2),
            kills=((3.72, 1),),
        ),
        ("committed 0", "died 1", "respawn 1", "drop 0 failed", "again after", "1 ready"),
    ),
    "preemption_storm": Story(
        "recompute",
        scenario(_workload(*_every(0.01, 30, (200, 400))), 1, small_profile(8_000)),
        ("preempted", "preempted", "preempted", "preempted", "end r29"),
    ),
    "restore_postponed": Story(
        "drop",
        scenario(_workload(*_BURST, (3.0, 19_000, 700), *_every(1.0, 45, (200, 20), 10.0))),
        ("announce drop 0 done", "postponed", "announce restore 1 done"),
    ),
}
