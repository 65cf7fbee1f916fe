"""A pipeline's decodes in one microbatch or in several, by what their rounds took."""

from collections import deque
from dataclasses import replace

from kunserve.control.group.rounds import rounds_of
from kunserve.control.group.scheduler import Scheduler
from kunserve.core.config import SchedulerConfig
from kunserve.core.ids import GroupId, RequestId
from kunserve.core.request import Request, SamplingParams
from kunserve.core.speculative_config import SpeculativeConfig
from kunserve.core.step import SampledToken, StepPlan, StepResult
from kunserve.policy.batch.decode_split import DecodeSplit

GROUP = GroupId(3)


def make(how: str = "measured", stages: int = 2, max_num_seqs: int = 8) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16,
        enable_prefix_caching=False,
        decode_microbatches=how,
    )
    return Scheduler(config, GROUP, stages, 4, 1000, frozenset(), 4000)


def add(scheduler: Scheduler, name: str, num_prompt: int = 1, max_tokens: int = 500) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    scheduler.add(Request(RequestId(name), tuple(range(num_prompt)), params, 0.0))


class Pipeline:
    """Runs what the scheduler plans. A microbatch takes longer if others are in flight with it."""

    def __init__(self, scheduler: Scheduler, joined_s: float, parted_s: float) -> None:
        self.scheduler, self.now_s = scheduler, 0.0
        self.joined_s, self.parted_s = joined_s, parted_s
        self.flying: deque[StepPlan] = deque()
        self.sizes: list[int] = []
        """Chunks of each microbatch, in order."""

    def plan(self) -> None:
        while (plan := self.scheduler.schedule(self.now_s)) is not None:
            self.flying.append(plan)
            self.sizes.append(len(plan.chunks))
        self.scheduler.check()

    def step(self) -> None:
        """Plan all that may be planned, and let the oldest come back."""
        self.plan()
        number = len(self.flying)
        self.now_s += self.joined_s if number == 1 else self.parted_s / number
        plan = self.flying.popleft()
        tokens = tuple(SampledToken(c.request_id, 7, None) for c in plan.chunks if c.samples)
        self.scheduler.complete(StepResult(GROUP, plan.step_id, tokens), self.now_s)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def last(self, num: int = 4) -> set[int]:
        """Sizes of the last microbatches."""
        return set(self.sizes[-num:])


def decoding(scheduler: Scheduler, joined_s: float, parted_s: float, num: int = 4) -> Pipeline:
    for number in range(num):
        add(scheduler, f"r{number}")
    pipeline = Pipeline(scheduler, joined_s, parted_s)
    pipeline.run(80)
    return pipeline


def test_decodes_go_the_way_that_was_faster() -> None:
    assert decoding(make(), 0.01, 0.02).last() == {4}
    assert decoding(make(), 0.02, 0.01).last() == {2}
    assert decoding(make(stages=4), 0.01, 0.02).last() == {4}
    assert decoding(make(stages=4), 0.02, 0.01).last() == {1}


def test_nothing_is_tried_unless_it_is_wanted() -> None:
    assert SchedulerConfig().decode_microbatches == "stages"
    pipeline = decoding(make("stages"), 0.01, 0.02)
    assert set(pipeline.sizes[4:]) == {2}


def test_a_single_instance_has_nothing_to_choose() -> None:
    assert set(decoding(make(stages=1), 0.01, 0.02).sizes[4:]) == {4}


def test_a_prompt_begins_at_once_beside_joined_decodes() -> None:
    pipeline = decoding(make(), 0.01, 0.02)
    pipeline.plan()
    assert len(pipeline.flying) == 1, "one microbatch has all decodes"
    add(pipeline.scheduler, "late", num_prompt=12)
    pipeline.plan()
    assert len(pipeline.flying) == 2, "and the prompt has the other stage"
    assert [chunk.num_tokens for chunk in pipeline.flying[-1].chunks] == [12]
    pipeline.step()
    pipeline.plan()
    assert len(pipeline.flying[-1].chunks) < 4, "decodes are spread while a prompt is computed"
    pipeline.run(80)
    assert pipeline.last() == {5}


def test_more_decodes_than_a_microbatch_may_have_are_parted() -> None:
    pipeline = decoding(make(max_num_seqs=3), 0.01, 0.02, num=4)
    pipeline.plan()
    assert len(pipeline.flying) == 2


def test_every_request_ends_whatever_the_ways_take() -> None:
    for joined_s, parted_s in ((0.01, 0.02), (0.02, 0.01), (0.01, 0.01)):
        scheduler = make()
        for number in range(6):
            add(scheduler, f"r{number}", num_prompt=1 + 3 * number, max_tokens=5 + 7 * number)
        pipeline = Pipeline(scheduler, joined_s, parted_s)
        for _ in range(400):
            if not scheduler.has_work:
                break
            pipeline.step()
        assert not scheduler.has_work and scheduler.used_blocks == 0


class Notes(DecodeSplit):
    """Keeps what it is told, and joins."""

    def __init__(self) -> None:
        super().__init__(2)
        self.told: list[tuple[int, int, bool]] = []

    def parts(self, num_decodes: int, now_s: float) -> int:
        return 1

    def note(
        self, parts: int, num_decodes: int, seconds: float, now_s: float, *, is_alone: bool
    ) -> None:
        self.told.append((parts, num_decodes, is_alone))


def listened_to() -> tuple[Pipeline, Notes]:
    """Three that decode, joined."""
    scheduler, notes = make(), Notes()
    rounds = scheduler._forming._rounds
    assert rounds is not None
    rounds._split = notes
    pipeline = decoding(scheduler, 0.01, 0.02, num=3)
    assert notes.told[-1] == (1, 3, True)
    notes.told.clear()
    return pipeline, notes


def test_a_round_that_a_prompt_came_beside_is_told_from_the_others() -> None:
    pipeline, notes = listened_to()
    pipeline.plan()
    add(pipeline.scheduler, "late", num_prompt=12)
    pipeline.step()
    assert notes.told == [(1, 3, False)]
    pipeline.run(6)
    assert notes.told[-1] == (1, 4, True)
    assert len(notes.told) < 7, "nothing is told of what is planned beside the prompt"


def test_an_exchange_has_no_rounds() -> None:
    """Its copies take time, and some of its requests stand still."""
    pipeline, notes = listened_to()
    pipeline.scheduler.may_preempt = False
    pipeline.run(6)
    assert len(notes.told) <= 1, "of the one that was in flight"
    assert pipeline.last() <= {1, 2}


def test_guesses_leave_nothing_to_choose() -> None:
    """Rounds with guesses give more tokens, so their times are not to be compared."""
    config = SchedulerConfig(decode_microbatches="measured", speculative_config=SpeculativeConfig())
    assert rounds_of(config, 2) is None
    rounds = rounds_of(replace(config, speculative_config=None), 2)
    assert rounds is not None and rounds.next(4, 0.0) is not None
