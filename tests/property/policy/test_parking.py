"""Parking over random requests in a memory of blocks: bounded pauses, turns, and nobody starves.

A second passes at a time. Each request takes a block per token, computes its prompt in a second,
and ends after its output. The policy's rules are applied as `control/group/parking.py` applies
them, without copies and growth.
"""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kunserve.policy.batch.parking import (
    MAX_AWAY_SHARE,
    RUN_SHARE,
    Away,
    Decoding,
    choose_in_place,
    choose_parked,
    num_due,
    room_for,
)

CAPACITY = 100
LONGEST_S = 3000


@dataclass
class Job:
    """A request, and what became of it."""

    arrival_s: int
    num_blocks: int
    num_output: int
    num_made: int = 0
    streams_since_s: int = 0
    away_since_s: int = 0
    pauses_s: list[int] = field(default_factory=list)
    runs_s: list[int] = field(default_factory=list)
    """Between a return, or the first token, and the parking after it for the queue's head."""


class World:
    """Memory, a queue, those that run and those that are away."""

    def __init__(self, jobs: list[Job], max_park_s: int) -> None:
        self.waiting = sorted(jobs, key=lambda job: job.arrival_s)
        self.max_park_s = max_park_s
        self.running: list[Job] = []
        self.away: list[Job] = []
        self.now_s = 0

    @property
    def free(self) -> int:
        return CAPACITY - sum(job.num_blocks for job in self.running)

    def second(self) -> None:
        self.now_s += 1
        for job in self.running:
            job.num_made += 1
            if job.num_made == 1:
                job.streams_since_s = self.now_s
        self.running = [job for job in self.running if job.num_made < job.num_output]
        if self.bring_back():
            self.admit()
        assert self.free >= 0

    def bring_back(self) -> bool:
        views = [Away(self.now_s - job.away_since_s, 0.0) for job in self.away]
        due = num_due(views, 1e-9, self.max_park_s)
        for job in self.away[:due]:
            if job.num_blocks > self.free:
                chosen = choose_in_place(self.views(), job.num_blocks - self.free, self.max_park_s)
                self.park(chosen)
            if job.num_blocks > self.free:
                return False
            self.come_back(job)
        queued = sum(j.num_blocks for j in self.waiting if j.arrival_s <= self.now_s)
        for job in tuple(self.away):
            if job.num_blocks + queued > self.free:
                break
            self.come_back(job)
        return True

    def come_back(self, job: Job) -> None:
        self.away.remove(job)
        self.running.append(job)
        job.pauses_s.append(self.now_s - job.away_since_s)
        job.streams_since_s = self.now_s

    def admit(self) -> None:
        while self.waiting and self.waiting[0].arrival_s <= self.now_s:
            head = self.waiting[0]
            missing = head.num_blocks - self.free
            if missing > 0:
                away = sum(job.num_blocks for job in self.away)
                room = room_for(CAPACITY, away, None, 1e9, self.max_park_s)
                chosen = choose_parked(self.views(), missing, room, self.max_park_s)
                for index in chosen:
                    job = self.decodes()[index]
                    job.runs_s.append(self.now_s - job.streams_since_s)
                self.park(chosen)
                assert not chosen or head.num_blocks <= self.free, "parked, and no first token"
                assert sum(job.num_blocks for job in self.away) <= max(
                    away, MAX_AWAY_SHARE * CAPACITY
                )
            if head.num_blocks > self.free:
                return
            self.running.append(self.waiting.pop(0))

    def decodes(self) -> list[Job]:
        return [job for job in self.running if job.num_made]

    def views(self) -> list[Decoding]:
        return [
            Decoding(
                job.num_blocks, job.num_made, len(job.pauses_s), self.now_s - job.streams_since_s
            )
            for job in self.decodes()
        ]

    def park(self, chosen: list[int]) -> None:
        for job in [self.decodes()[index] for index in chosen]:
            self.running.remove(job)
            self.away.append(job)
            job.away_since_s = self.now_s


@given(
    jobs=st.lists(
        st.builds(
            Job,
            arrival_s=st.integers(0, 60),
            num_blocks=st.integers(1, 50),
            num_output=st.integers(1, 60),
        ),
        max_size=25,
    ),
    max_park_s=st.integers(4, 30),
)
def test_pauses_are_bounded_and_nobody_starves(jobs: list[Job], max_park_s: int) -> None:
    world = World(jobs, max_park_s)
    while world.waiting or world.running or world.away:
        assert world.now_s < LONGEST_S, "somebody starves"
        world.second()
    for job in jobs:
        assert job.num_made == job.num_output
        # A prompt that has just been admitted cannot make way before its first token.
        assert all(pause <= max_park_s + 1 for pause in job.pauses_s), job
        assert all(ran >= RUN_SHARE * max_park_s for ran in job.runs_s), job


decodings = st.lists(
    st.builds(
        Decoding,
        num_blocks=st.integers(1, 20),
        num_streamed=st.integers(1, 99),
        num_parked=st.integers(0, 3),
        ran_s=st.floats(0.0, 20.0),
        priority=st.integers(-2, 2),
    ),
    max_size=8,
)


@given(decodings, st.integers(1, 60), st.integers(-2, 2))
def test_who_is_urgent_goes_last(decodes: list[Decoding], missing: int, head: int) -> None:
    """Only where those who are less urgent, and may go, are not enough together."""
    for_head = choose_parked(decodes, missing, 1000, 10.0, head)
    assert all(decodes[i].priority >= head for i in for_head)
    may_go = [one for one in decodes if one.ran_s >= RUN_SHARE * 10.0]
    for chosen, among in ((for_head, may_go), (choose_in_place(decodes, missing, 10.0), decodes)):
        for i in chosen:
            others = [one for one in among if one.priority > decodes[i].priority]
            assert sum(one.num_blocks for one in others) < missing
        assert not chosen or sum(decodes[i].num_blocks for i in chosen) >= missing
