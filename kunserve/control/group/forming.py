"""What a group's next microbatch is formed from: `policy` on what runs and what is admissible."""

from operator import attrgetter

from kunserve.control.group.queue import WaitingQueue
from kunserve.control.group.sequence import Progress, Sequence
from kunserve.core.config import SchedulerConfig
from kunserve.core.plan import Measured
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


class Forming:
    """Owner of the formation whose microbatches are not all planned."""

    def __init__(
        self,
        config: SchedulerConfig,
        measured: Measured,
        num_stages: int,
        waiting: WaitingQueue,
        form_batch: FormBatch | None,
    ) -> None:
        """``form_batch`` None: as the configuration says."""
        self._config = config
        self._num_stages = num_stages
        self._waiting = waiting
        self._cost = measured.cost
        self._form_batch = form_batch or choose_formation(config, measured.cost)
        self._formation: OngoingFormation | None = None
        self._windows = measured.windows

    def form(
        self,
        decodes: list[Sequence],
        prompts: list[Sequence],
        num_awaiting: int,
        context: int,
        *,
        num_in_flight: int,
        num_left_waiting: int,
        is_memory_short: bool,
    ) -> Microbatch:
        """The next microbatch, of these (their order in ``decodes`` may change).

        ``num_awaiting`` sequences wait for a token, and read ``context`` tokens for it.
        """
        pace = self._pace(decodes, prompts, num_awaiting, context, is_memory_short)
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
        is_memory_short: bool,
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
            is_memory_short=is_memory_short,
        )
        return choose_pace(view, config.tpot_slo_s, self._cost)
