"""Who asks for what while chaos rages, and whether each got what it must."""

import asyncio
import random
import sys
from collections import Counter
from dataclasses import dataclass, field, replace

from benchmarks.faults.chaos_front import Abort, Front, Refused, Submit, Token
from benchmarks.faults.faulty_instance import POISON
from kunserve.core.ids import RequestId
from kunserve.core.request import FinishReason, Request, SamplingParams
from kunserve.core.tokens import TokenIds

VERDICTS = ("requests", "identical", "aborted", "cut", "poisoned", "wrong", "unfinished")
NUM_JOBS = 24
VOCAB = 49152
"""Of SmolLM2."""
IN_FLIGHT = 10
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Job:
    """What is asked for, again and again."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


@dataclass(slots=True)
class Story:
    """What became of one request."""

    job: int | None
    """None: it is poison."""
    token_ids: list[int] = field(default_factory=list)
    ends: list[FinishReason] = field(default_factory=list)
    was_aborted: bool = False
    was_cut: bool = False
    """The front died, and the client's connection with it."""
    faults: list[str] = field(default_factory=list)
    """What must never happen."""

    @property
    def is_open(self) -> bool:
        """Whether its client still waits."""
        return not (self.ends or self.was_aborted or self.was_cut)


def make_jobs(draw: random.Random) -> list[Job]:
    """Short and long, greedy and drawn."""
    jobs = []
    for number in range(NUM_JOBS):
        prompt = tuple(draw.randrange(100, VOCAB) for _ in range(draw.choice([5, 40, 150, 400])))
        sampling = SamplingParams(max_tokens=draw.choice([8, 24, 60, 120]), ignore_eos=True)
        if number % 3 == 2:
            sampling = replace(sampling, temperature=0.8, top_p=0.9, seed=number)
        else:
            sampling = replace(sampling, temperature=0.0)
        jobs.append(Job(prompt, sampling))
    return jobs


class Clients:
    """Keep a number of requests under way, and write down what becomes of each."""

    def __init__(self, jobs: list[Job], draw: random.Random) -> None:
        self._jobs = jobs
        self._draw = draw
        self._num_asked = 0
        self.stories: dict[RequestId, Story] = {}
        self.num_refused = 0

    @property
    def open(self) -> list[RequestId]:
        """Requests that have neither ended nor been given up by their client."""
        return [request_id for request_id, story in self.stories.items() if story.is_open]

    def ask(self, front: Front, job: int | None) -> Story | None:
        """Submit a job, or poison; None when no front is there."""
        what = Job(POISON, SamplingParams(max_tokens=20)) if job is None else self._jobs[job]
        request_id = RequestId(f"r{self._num_asked}")
        request = Request(request_id, TokenIds(what.prompt), what.sampling, 0.0)
        if not front.ask(Submit.of(request)):
            return None
        self._num_asked += 1
        story = self.stories[request_id] = Story(job)
        return story

    def hear(self, news: Token | Refused) -> None:
        """A word of the front."""
        request_id = RequestId(news.request_id)
        if isinstance(news, Refused):
            self.stories.pop(request_id).was_cut = True
            self.num_refused += 1
            return
        story = self.stories[request_id]
        if not story.is_open and not story.was_aborted:
            story.faults.append("a token after the end")
        if story.was_aborted:
            return  # it was on its way when the client left
        if news.token_id is not None:
            if news.position != len(story.token_ids):
                story.faults.append(f"token {news.position} after {len(story.token_ids)}")
            story.token_ids.append(news.token_id)
        if news.finish_reason is not None:
            story.ends.append(news.finish_reason)

    def leave(self, front: Front) -> None:
        """One client goes away."""
        healthy = [i for i in self.open if self.stories[i].job is not None]
        if healthy:
            request_id = self._draw.choice(healthy)
            self.stories[request_id].was_aborted = True
            front.ask(Abort(request_id))

    def all_cut(self) -> None:
        """The front has died: so do the connections to it."""
        for request_id in self.open:
            self.stories[request_id].was_cut = True

    async def keep_asking(self, front: Front) -> None:
        """Until cancelled."""
        while True:
            while len(self.open) < IN_FLIGHT:
                if self.ask(front, self._draw.randrange(len(self._jobs))) is None:
                    break
            await asyncio.sleep(POLL_S)


def judge(stories: dict[RequestId, Story], expected: list[tuple[int, ...]]) -> dict[str, int]:
    """Count what became of the requests. ``wrong`` is what must not happen at all."""
    counts = Counter(dict.fromkeys(VERDICTS, 0))
    for request_id, story in stories.items():
        counts["requests"] += 1
        verdict = _verdict(story, expected)
        counts[verdict] += 1
        if verdict in ("wrong", "unfinished"):
            print(f"{request_id}: {verdict}: {story}", file=sys.stderr)
    return dict(counts)


def _verdict(story: Story, expected: list[tuple[int, ...]]) -> str:
    if story.faults or len(story.ends) > 1:
        return "wrong"
    if story.was_aborted or (story.was_cut and not story.ends):
        known = expected[story.job] if story.job is not None else ()
        kind = "aborted" if story.was_aborted else "cut"
        return kind if tuple(story.token_ids) == known[: len(story.token_ids)] else "wrong"
    if not story.ends:
        return "unfinished"
    if story.job is None:
        return "poisoned" if story.ends == [FinishReason.ERROR] else "wrong"
    return "identical" if tuple(story.token_ids) == expected[story.job] else "wrong"
