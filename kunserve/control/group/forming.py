"""Who computes how many tokens in a group's next step: `policy` on what runs and is admissible."""

from collections.abc import Callable
from operator import attrgetter

from kunserve.control.group.admission import Admission
from kunserve.control.group.queue import WaitingQueue
from kunserve.control.group.relief import Holders
from kunserve.control.group.sequence import Progress, Sequence
from kunserve.core.config import SchedulerConfig
from kunserve.core.plan import Measured
from kunserve.core.request import SamplingParams
from kunserve.policy.batch.batch_form import (
    FormationView,
    FormBatch,
    Microbatch,
    OngoingFormation,
    PromptWork,
)
from kunserve.policy.batch.lookahead import choose_formation
from kunserve.policy.batch.pace import Pace, PaceView, choose_pace

_last_step_of = attrgetter("last_step")

Chosen = list[tuple[Sequence, int]]
"""Sequences that have memory, and how many tokens of each are computed."""


class Forming:
    """Owner of the formation whose microbatches are not all planned."""

    def __init__(
        self,
        config: SchedulerConfig,
        measured: Measured,
        num_stages: int,
        waiting: WaitingQueue,
        holders: Holders,
        admission: Admission,
        form_batch: FormBatch | None,
    ) -> None:
        """``form_batch`` None: as the configuration says."""
        self._config = config
        self._num_stages = num_stages
        self._waiting = waiting
        self._holders = holders
        self._admission = admission
        self._cost = measured.cost
        self._form_batch = form_batch or choose_formation(config, measured.cost)
        self._formation: OngoingFormation | None = None
        self._windows = measured.windows
        self.is_memory_short = False
        """At the last step memory was what kept a request from being admitted or run."""

    def form(self, now_s: float, *, num_in_flight: int, may_preempt: bool) -> Chosen:
        """For the step behind so many. The new among the chosen are admitted."""
        holders, admission = self._holders, self._admission
        decodes, prompts, num_awaiting, context = holders.runnable()
        unfit = holders.secure(decodes, prompts, may_preempt=may_preempt)
        num_waiting = len(self._waiting)
        if unfit is not None:
            # Memory is short: nobody is admitted, and who did not get a block sits out.
            self.is_memory_short = True
            if holders.parks:
                holders.swap_in(admission.room(holders.num_running), may_preempt=may_preempt)
            decodes = [s for s in decodes if s.state is Progress.RUNNING and s not in unfit]
            prompts = [s for s in prompts if s.state is Progress.RUNNING and s not in unfit]
        else:
            admissible = admission.choose(prompts, may_preempt=may_preempt)
            prompts.extend(admissible)
            num_waiting -= len(admissible)
            self.is_memory_short = admission.missing_blocks > 0
            if holders.parks:
                decodes = [s for s in decodes if s.state is Progress.RUNNING]
        batch = self._microbatch(
            decodes,
            prompts,
            num_awaiting,
            context,
            num_in_flight=num_in_flight,
            num_left_waiting=num_waiting,
        )
        return self._admit(batch, decodes, prompts, now_s)

    def form_ahead(
        self,
        now_s: float,
        pool_tokens: int,
        feeds_back: Callable[[SamplingParams], bool],
        num_in_flight: int,
    ) -> Chosen:
        """As ``form`` will once the oldest step is complete, if nobody ends in it or comes until
        then: who awaits a token of it computes that one.

        Nobody where anybody's memory had to be freed, where one of all needs what a step gives here
        first, or where there is something to do that waits for no token.
        """
        holders, admission = self._holders, self._admission
        if holders.parks and self._waiting:
            return []

        def may_go(seq: Sequence) -> bool:
            return feeds_back(seq.request.sampling) and not seq.has_scores_to_come

        decodes, prompts, num_awaiting, context = holders.who_goes_on(pool_tokens, may_go)
        if not (decodes or prompts):
            return []
        if num_in_flight < self._num_stages and (
            prompts or self._waiting or not all(seq.is_awaiting for seq in decodes)
        ):
            return []
        admissible = admission.candidates(admission.room(holders.num_running), prompts)
        is_short = admission.missing_blocks > 0
        if is_short > self.is_memory_short or not all(map(may_go, admissible)):
            return []  # whoever plans the next step tells of a shortage that begins
        self.is_memory_short = is_short
        prompts.extend(admissible)
        batch = self._microbatch(
            decodes,
            prompts,
            num_awaiting,
            context,
            num_in_flight=num_in_flight - 1,
            num_left_waiting=len(self._waiting) - len(admissible),
        )
        return self._admit(batch, decodes, prompts, now_s)

    def _admit(
        self, batch: Microbatch, decodes: list[Sequence], prompts: list[Sequence], now_s: float
    ) -> Chosen:
        chosen = [(decodes[index], 1) for index in batch.decodes]
        for index, num_tokens in batch.prompts:
            seq = prompts[index]
            if seq.state is Progress.WAITING:
                self._holders.admit(seq, now_s)
            chosen.append((seq, num_tokens))
        return chosen

    def _microbatch(
        self,
        decodes: list[Sequence],
        prompts: list[Sequence],
        num_awaiting: int,
        context: int,
        *,
        num_in_flight: int,
        num_left_waiting: int,
    ) -> Microbatch:
        """Of these (their order in ``decodes`` may change).

        ``num_awaiting`` sequences wait for a token, and read ``context`` tokens for it.
        """
        pace = self._pace(decodes, prompts, num_awaiting, context)
        is_split = self._num_stages > 1 or pace.decode_rounds > 1
        if is_split or len(decodes) > min(pace.max_num_tokens, self._config.max_num_seqs):
            decodes.sort(key=_last_step_of)
        view = FormationView(
            decodes=self._contexts(decodes),
            prompts=[
                PromptWork(seq.num_computed + found, seq.num_left - found)
                for seq in prompts
                for found in (seq.beginning.found_tokens,)
            ],
            num_decodes_in_flight=num_awaiting,
            num_in_flight=num_in_flight,
            num_stages=self._num_stages,
            max_num_tokens=pace.max_num_tokens,
            max_num_seqs=self._config.max_num_seqs,
            decode_rounds=pace.decode_rounds,
            context_in_flight=context,
            has_backlog=num_left_waiting > 0,
        )
        batch, self._formation = self._form_batch(view, self._formation)
        return batch

    def _contexts(self, decodes: list[Sequence]) -> list[int]:
        """What each of them reads."""
        contexts = [seq.num_computed for seq in decodes]
        return list(map(self._windows.seen_keys, contexts)) if self._windows.share else contexts

    def _pace(
        self,
        decodes: list[Sequence],
        prompts: list[Sequence],
        num_awaiting: int,
        context: int,
    ) -> Pace:
        """How large the next step is, and how often decodes run."""
        config = self._config
        if config.tpot_slo_s is None or self._cost is None or not prompts:
            return Pace(config.max_num_batched_tokens, 1)
        num_queued = self._waiting.num_tokens
        num_queued += sum(seq.num_left for seq in prompts if seq.state is Progress.RUNNING)
        view = PaceView(
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_queued_tokens=num_queued,
            prefix=prompts[0].num_computed + prompts[0].beginning.found_tokens,
            num_decodes=len(decodes) + num_awaiting,
            num_context_tokens=context + sum(self._contexts(decodes)),
            num_stages=self._num_stages,
            is_memory_short=self.is_memory_short,
        )
        return choose_pace(view, config.tpot_slo_s, self._cost)
