"""The output head of a pipeline, computed by all its stages together (vocabulary-parallel).

The last stage gives what the last layer made of the tokens that sample. Each stage computes the
logits of its rows of the vocabulary, and the leader, which has the scheduler, samples from all of
them. ``policy.head_split`` says why, and which rows.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kunserve.control.instance.body import HeadWork, SampleWork, StepOutcome, StepWork
from kunserve.control.instance.state import InstanceState
from kunserve.control.instance.work import Work
from kunserve.core.ids import RequestId, StepId
from kunserve.core.layout import GroupLayout, VocabRange
from kunserve.core.messages import FinalRows, HeadPart
from kunserve.core.prompt_scores import PromptScores
from kunserve.core.step import StepPlan, StepResult
from kunserve.policy.drop.head_split import split_head


@dataclass(slots=True)
class _Gathering:
    """On the leader: a microbatch that has run here and is not sampled yet."""

    plan: StepPlan
    skipped: set[RequestId] = field(default_factory=set)
    """Requests that were released since: their tokens are wanted no more."""
    scores: tuple[PromptScores | None, ...] | None = None
    """None until the last stage has run the microbatch."""
    parts: dict[int, Any] = field(default_factory=dict)
    """By the first row of each."""


class OutputHead:
    """One instance's part in its group's output head.

    Owner of the microbatches whose tokens the leader is yet to sample.
    """

    def __init__(
        self, state: InstanceState, layout: GroupLayout, shares: tuple[VocabRange, ...]
    ) -> None:
        """``shares`` in stage order."""
        self._state = state
        self._leader = layout.leader
        self._leads = layout.leader == state.me
        members = zip(layout.members, shares, strict=True)
        self._shares = {member: share for member, share in members if share.num_rows}
        self._takers = sorted({*self._shares, self._leader} - {state.me})
        self._expected: dict[StepId, StepPlan] = {}
        """Microbatches that have run here, and whose final rows are to come."""
        self._rows: deque[tuple[StepPlan, Any]] = deque()
        """Microbatches whose part is to be computed here."""
        self._gatherings: dict[StepId, _Gathering] = {}
        """In the order of their steps."""

    @property
    def has_work(self) -> bool:
        """Whether ``next_work`` gives anything."""
        if self._rows:
            return True
        num_parts = len(self._shares)
        for gathering in self._gatherings.values():
            if gathering.scores is not None and len(gathering.parts) == num_parts:
                return True
        return False

    def next_work(self) -> Work | None:
        """What comes before any layers, because other stages wait for it and it is short."""
        for step_id, gathering in self._gatherings.items():
            if gathering.scores is not None and self._is_complete(gathering):
                del self._gatherings[step_id]
                parts = tuple(sorted(gathering.parts.items(), key=lambda item: item[0]))
                skipped = frozenset(gathering.skipped)
                return Work(SampleWork(gathering.plan, parts, skipped, gathering.scores), None)
        if not self._rows:
            return None
        plan, rows = self._rows.popleft()
        return Work(HeadWork(plan, self._shares[self._state.me]), rows)

    def _is_complete(self, gathering: _Gathering) -> bool:
        return gathering.scores is not None and len(gathering.parts) == len(self._shares)

    def ran(self, step: StepWork, outcome: StepOutcome) -> bool:
        """The stage ran its layers; whether its outcome is the head's, and passed on here."""
        plan, state = step.plan, self._state
        if not (step.is_last or plan.samples):
            return False
        if step.is_first:
            self._gatherings[plan.step_id] = _Gathering(plan)
        if not step.is_last:
            if state.me in self._shares:
                self._expected[plan.step_id] = plan
            return False
        if not step.gives_rows:
            return False
        for other in self._takers:
            scores = outcome.scores if other == self._leader else ()
            state.send(other, FinalRows(plan.group_id, plan.step_id, scores), outcome.hidden)
        if state.me in self._shares:
            self._rows.append((plan, outcome.hidden))
        return True

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Requests ended or were preempted: what of them is under way is sampled no more.

        The body forgets them now, or starts them anew, though tokens of theirs may come still.
        """
        for gathering in self._gatherings.values():
            gathering.skipped.update(request_ids)

    def read(self, message: FinalRows | HeadPart, hidden: Any) -> None:
        """The last stage has run a microbatch; or, on the leader, a stage has computed its rows."""
        match message:
            case FinalRows(_, step_id, scores):
                if self._state.me in self._shares:
                    self._rows.append((self._expected.pop(step_id), hidden))
                if self._leads:
                    self._gatherings[step_id].scores = scores
            case HeadPart(_, step_id, first_row):
                self._gatherings[step_id].parts[first_row] = hidden

    def finished(self, work: HeadWork | SampleWork, outcome: StepOutcome) -> StepResult | None:
        """The body did it: the microbatch's result, if this was the last of it."""
        plan = work.plan
        if isinstance(work, SampleWork):
            return outcome.result_of(plan)
        message = HeadPart(plan.group_id, plan.step_id, work.rows.first)
        if self._leads:
            self.read(message, outcome.hidden)
        else:
            self._state.send(self._leader, message, outcome.hidden)
        return None

    def check(self) -> None:
        """Assert order, and that nothing is gathered that nobody waits for."""
        steps = list(self._gatherings)
        assert self._leads or not steps, steps
        assert steps == sorted(steps), steps
        firsts = {share.first for share in self._shares.values()}
        for gathering in self._gatherings.values():
            assert gathering.parts.keys() <= firsts, (gathering.parts.keys(), firsts)


def find_head(state: InstanceState, layout: GroupLayout) -> OutputHead | None:
    """The group's shared head; None where the last stage computes it alone."""
    heads = {state.specs[member].head for member in layout.members}
    head = heads.pop()
    if len(layout.stages) == 1 or head is None or heads:
        return None
    shares = split_head([layers.num_layers for _, layers in layout.stages], head)
    return OutputHead(state, layout, shares)
