"""Which tokens a group computes next: continuous batching in the leader's process.

Sans-I/O: the driver asks for plans with ``schedule`` and brings results to ``complete``. The
scheduler counts blocks (``Ledger``); instances place them when they run the plans, in order.
"""

from collections.abc import Callable, Collection, Iterable
from operator import attrgetter

from kunserve.control.arrays import Int32Array
from kunserve.control.group.admission import Admission
from kunserve.control.group.cache_journal import CacheJournal
from kunserve.control.group.forming import Forming
from kunserve.control.group.guessing import Guessing
from kunserve.control.group.in_flight import InFlight, PlannedStep
from kunserve.control.group.ledger import Ledger
from kunserve.control.group.load import ProgressClock, SchedulerTotals, measure_load
from kunserve.control.group.migration import MigrationAccess
from kunserve.control.group.prefix_cache import NEVER_FULL, PrefixCache
from kunserve.control.group.queue import WaitingQueue
from kunserve.control.group.relief import Holders
from kunserve.control.group.residency import Residency
from kunserve.control.group.sequence import Progress, Sequence, make_sequence
from kunserve.core.config import SchedulerConfig
from kunserve.core.ids import GroupId, RequestId, StepId
from kunserve.core.kv_blocks import KvBlocks
from kunserve.core.load import LoadReport
from kunserve.core.messages import SequenceState, TokenOutput
from kunserve.core.plan import NOTHING_MEASURED, Measured
from kunserve.core.prompt_scores import PromptScores
from kunserve.core.request import FinishReason, Request, SamplingParams
from kunserve.core.step import LATE, StepPlan, StepResult
from kunserve.core.tokens import TokenIds
from kunserve.policy.batch.batch_form import FormBatch
from kunserve.policy.batch.relief import NO_HOST, HostLink

_key_of = attrgetter("key")


class Scheduler:
    """Owner of a group's requests, from arrival to their last token.

    A sequence is admitted with blocks for all its known tokens, so that a prompt never runs out
    half-way (but see `policy.batch.reserve`), and grows block by block as it decodes; ``Holders``
    finds a block when one is missing. With S stages up to S plans are in flight, one more behind
    them that awaits tokens of the oldest, and S times ``max_num_seqs`` sequences run: what S groups
    of one stage would run.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        group_id: GroupId,
        num_stages: int,
        block_size: int,
        capacity_blocks: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        totals: SchedulerTotals | None = None,
        form_batch: FormBatch | None = None,
        host_link: HostLink = NO_HOST,
        measured: Measured = NOTHING_MEASURED,
        journal: CacheJournal | None = None,
    ) -> None:
        """``host_link`` ``NO_HOST``: nobody is swapped."""
        self._config = config
        self._group_id = group_id
        self._num_stages = num_stages
        self._blocks = blocks = KvBlocks(block_size, measured.ring)
        self.totals = SchedulerTotals() if totals is None else totals
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._num_made = 0
        self._largest_capacity = capacity_blocks
        self._live: dict[RequestId, Sequence] = {}
        self._ledger = ledger = Ledger(capacity_blocks, config.watermark)
        self._waiting = waiting = WaitingQueue(blocks)
        self._in_flight = InFlight(group_id)
        self.feeds = self._in_flight.feeds
        """Of a step that runs ahead."""
        self._guessing = Guessing(config, measured, block_size)
        self._residency = Residency(self.totals)
        self._named_size = block_size if config.enable_prefix_caching else NEVER_FULL
        self.cache = PrefixCache(group_id, self._named_size, self._ledger, self._residency, journal)
        self._holders = Holders(
            blocks,
            ledger,
            waiting,
            self._in_flight,
            self.totals,
            config,
            measured,
            host_link,
            self.cache,
        )
        admission = Admission(
            config, num_stages, blocks, waiting, ledger, self._holders, self.cache
        )
        self._forming = Forming(
            config, measured, num_stages, waiting, self._holders, admission, form_batch
        )
        self.migration = MigrationAccess(blocks, self._live, self._waiting, self._ledger)
        self.may_preempt = True
        """False during an exchange: what does not fit then waits instead of preempting."""
        self._nothing_at: tuple[int, bool] | None = None
        """The ``_version`` at which the last ``schedule`` found nothing."""
        self._clock = ProgressClock()
        self._scores: list[PromptScores] = []

    # Requests come and go

    def may_hold(self, request: Request) -> bool:
        """Whether the request, with its output so far, has room here for a token at least."""
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        has_room = self._blocks.holding(num_tokens) <= self._largest_capacity
        return has_room and num_tokens < self._max_model_len

    def add(self, request: Request) -> None:
        """Queue a request by its arrival (ties by order of coming), output so far included."""
        assert self.may_hold(request), f"{request.request_id} can never fit"
        self._waiting.add(self._make(request, request.output_token_ids))

    def adopt(self, states: Iterable[SequenceState], stalled: Collection[RequestId] = ()) -> None:
        """Take sequences handed over by the group's former leaders, at a commit.

        Those with KV run on at once, but the ``stalled`` ones only after ``resume``.
        """
        for state in states:
            seq = self._make(state.request, state.output_token_ids)
            if state.num_computed == 0:
                seq.adopt(state, Progress.WAITING)
                self._waiting.add(seq)
                continue
            is_stalled = seq.request_id in stalled
            seq.adopt(state, Progress.STALLED if is_stalled else Progress.RUNNING)
            self.cache.adopt_shares(seq, state.shared)
            self._holders.adopt(seq, state.kv.first_own_block)

    def export(self) -> tuple[SequenceState, ...]:
        """Hand everything live over, in order of arrival, and be empty. What is swapped is lost.

        Called between steps. Blocks that no plan has released yet are not named: whoever takes
        over frees whatever belongs to no handed-over sequence.
        """
        assert not self._in_flight, f"{len(self._in_flight)} steps in flight"
        self._holders.lose_swapped()
        ordered = sorted(self._live.values(), key=_key_of)
        states = tuple(seq.hand_over(self._blocks) for seq in ordered)
        self._ledger.clear()
        self.cache.clear()
        self._waiting.clear()
        self._live.clear()
        self._holders.clear()
        return states

    def resume(self, request_id: RequestId) -> None:
        """The request's KV has arrived. Unknown ids are allowed: it may be aborted already."""
        seq = self._live.get(request_id)
        if seq is not None and seq.state is Progress.STALLED:
            self._holders.resume(seq)

    def abort(self, request_id: RequestId, *, keeps: bool = True) -> bool:
        """Forget the request, whatever it is doing; False if it is unknown (or has ended).

        ``keeps``: nothing was wrong with its KV, so that other requests may use it.
        """
        seq = self._live.pop(request_id, None)
        if seq is None:
            return False
        if seq.state is Progress.WAITING:
            self._waiting.remove(seq)
        else:
            self._holders.remove(seq, keeps=keeps)
        seq.move_to(Progress.ENDED)
        return True

    def give_back_all(self) -> tuple[RequestId, ...]:
        """At the group's end, as ``give_back`` of all that wait. What is swapped is lost: it waits.

        Called between steps.
        """
        self._holders.lose_swapped()
        return self.give_back(tuple(self._live))

    def give_back(self, request_ids: Iterable[RequestId]) -> tuple[RequestId, ...]:
        """Forget those of these requests that wait; they run elsewhere."""
        found = [self._live[i] for i in request_ids if i in self._live]
        waiting = [seq for seq in found if seq.state is Progress.WAITING]
        for seq in waiting:
            self.abort(seq.request_id)
        return tuple(seq.request_id for seq in waiting)

    @property
    def capacity_blocks(self) -> int:
        """What sequences may use now, if they do not use more."""
        return self._ledger.capacity_blocks

    def set_capacity(self, blocks: int) -> None:
        """The group's KV memory is ``blocks`` from now on; it may be less than what is used."""
        self._ledger.resize(blocks)
        self._largest_capacity = max(self._largest_capacity, blocks)

    def allow_parking(self, now_s: float) -> None:
        """Nothing is left to drop: for as long as a pause may be, requests may be parked."""
        self._holders.allow_parking(now_s)

    # Steps

    def schedule(self, now_s: float, *, is_copying: bool = False) -> StepPlan | None:
        """The next microbatch, or None when nothing can run now.

        May be called again before ``complete``. Every plan returned must be run by all stages, in
        order, and completed; one without chunks only frees blocks. ``is_copying``: what an earlier
        one moves to host memory or back is not there yet.
        """
        in_flight, holders = self._in_flight, self._holders
        if in_flight.is_ahead or len(in_flight) >= self._num_stages:
            return None
        self._clock.look(self.has_work, now_s)
        self._residency.now_s = now_s
        holders.end_copies(now_s, is_copying=is_copying)
        chosen = self._forming.form(
            now_s, num_in_flight=len(in_flight), may_preempt=self.may_preempt
        )
        if not chosen and (in_flight or not (self._frees_memory or holders.may_copy)):
            self._nothing_at = self._version
            return None
        self._nothing_at = None
        copies = holders.plan_copies(chosen)
        orders = self.cache.take_orders()
        guesses = self._guessing.choose(chosen)
        released = holders.take_released()
        plan = in_flight.add(released, chosen, *copies, orders, guesses)
        self.cache.note_computed(in_flight.filled)
        return plan

    def schedule_ahead(
        self, now_s: float, feeds_back: Callable[[SamplingParams], bool]
    ) -> StepPlan | None:
        """The next microbatch behind those under way, if it needs of them only the oldest one's
        tokens, as inputs.

        ``feeds_back``: whether the body hands such a request's tokens on by itself.
        """
        config, in_flight = self._config, self._in_flight
        is_off = not config.async_scheduling or config.speculative_config is not None
        if is_off or not in_flight or in_flight.is_ahead:
            return None
        pool_tokens = self._blocks.tokens_in(self._largest_capacity)
        num_in_flight = len(in_flight)
        chosen = self._forming.form_ahead(now_s, pool_tokens, feeds_back, num_in_flight)
        return in_flight.add_ahead(chosen, self.cache.take_orders()) if chosen else None

    @property
    def feeds_on(self) -> StepId | None:
        """Whose tokens the step that runs ahead reads, as long as they are not here."""
        return self._in_flight.oldest if self._in_flight.is_ahead else None

    def complete(self, result: StepResult, now_s: float) -> list[TokenOutput]:
        """Take a step's sampled tokens; the outputs to stream, with ends detected.

        None while an earlier step's result is still to come: then its call gives both.
        """
        assert result.group_id == self._group_id, (result.group_id, self._group_id)
        outputs: list[TokenOutput] = []
        self._residency.now_s = now_s
        version = self._in_flight.version
        for due, step in self._in_flight.complete(result):
            outputs += self._complete_step(due, step, now_s)
        if self._in_flight.is_ahead and self._in_flight.version != version:
            self._in_flight.begin_ahead()
            self.cache.note_computed(self._in_flight.filled)
        return outputs

    def _complete_step(
        self, result: StepResult, step: PlannedStep, now_s: float
    ) -> list[TokenOutput]:
        pool_tokens = self._blocks.tokens_in(self._largest_capacity)
        outputs = self._take_scores(result, step) if step.scored else []
        num_ended, num_failed = 0, len(outputs)
        for (request_id, token_id, logprobs), seq in step.owned(result.tokens, self.totals):
            if seq is None or seq.state is Progress.ENDED:
                continue
            assert request_id == seq.request_id, (request_id, seq.request_id)
            if token_id == LATE:
                seq.wait_on()
                continue
            num_failed += token_id is None
            output = seq.append_token(token_id, logprobs, pool_tokens, now_s)
            outputs.append(output)
            if output.finish_reason is not None:
                num_ended += 1
                self.totals.note_finished(seq)
                del self._live[request_id]
                self._holders.end(seq, keeps=token_id is not None)
        if num_ended:
            self._holders.drop_ended()
        self.totals.note_step(step.num_prompt_tokens, len(outputs) - num_failed)
        self._clock.completed(self.has_work, now_s)
        return outputs

    def take_scores(self) -> tuple[PromptScores, ...]:
        """Scores of prompts since the last call, in order and each once."""
        scores, self._scores = tuple(self._scores), []
        return scores

    def token_ids_of(self, plan: StepPlan) -> Int32Array:
        """The plan's input tokens, chunk after chunk, while it is in flight (for stage 0)."""
        return self._in_flight.token_ids_of(plan)

    def _take_scores(self, result: StepResult, step: PlannedStep) -> list[TokenOutput]:
        """Keep the scores that are new; the ends of requests whose logits cannot be used."""
        failed: list[TokenOutput] = []
        for scores, seq in zip(result.scores, step.scored, strict=True):
            if seq.state is Progress.ENDED:
                continue
            if scores is not None:
                fresh = seq.take_scores(scores)
                if fresh is not None:
                    self._scores.append(fresh)
                continue
            request_id = seq.request_id
            self.totals.note_finished(seq)
            self.abort(request_id, keeps=False)
            step.sampling = [None if one is seq else one for one in step.sampling]
            failed.append(TokenOutput(request_id, seq.num_output, None, None, FinishReason.ERROR))
        return failed

    # Seen from outside

    @property
    def num_in_flight(self) -> int:
        """Plans whose results have not come."""
        return len(self._in_flight)

    @property
    def is_memory_short(self) -> bool:
        """Whether memory was what kept a request from being admitted or run, at the last plan."""
        return self._forming.is_memory_short

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold or have reserved."""
        return self._ledger.used_blocks

    @property
    def cached_blocks(self) -> int:
        """Blocks that only the prefix cache holds."""
        return self._ledger.cached_blocks

    @property
    def is_evicting(self) -> bool:
        """Whether the next plan frees blocks that the prefix cache holds too many of."""
        return self.cache.has_orders

    @property
    def has_work(self) -> bool:
        """Whether anything is in flight, runs, waits or must be released (stalled ones do not)."""
        return bool(self._in_flight or self._waiting or self._holders.have_work or self.is_evicting)

    @property
    def can_schedule(self) -> bool:
        """Whether ``schedule`` may give a plan: false after it did not, until something happens."""
        return (
            self._nothing_at != self._version
            and not self._in_flight.is_ahead
            and len(self._in_flight) < self._num_stages
            and self.has_work
        )

    @property
    def _version(self) -> tuple[int, bool]:
        """Another value whenever something has happened that may give ``schedule`` a plan."""
        num_changes = self._waiting.version + self._ledger.version + self._in_flight.version
        return num_changes + self._holders.version, self.may_preempt

    def load(self, sequence_number: int, num_received: int, now_s: float) -> LoadReport:
        """The group's load, about ten times a second."""
        self._clock.look(self.has_work, now_s)
        self._residency.now_s = now_s
        return measure_load(
            self._group_id,
            sequence_number,
            num_received,
            self._live.values(),
            self._waiting,
            self._ledger,
            self.totals,
            self._blocks,
            stuck_s=self._clock.stuck_s(now_s),
            cache=self.cache,
        )

    def drain_preemptions(self) -> list[tuple[RequestId, int]]:
        """(request, tokens of KV lost) of each preemption since the last call, for the log."""
        drained, self._holders.preemptions = self._holders.preemptions, []
        return drained

    def check(self) -> None:
        """Assert that sequences, queue, ledger and steps in flight agree."""
        self._ledger.check()
        self._waiting.check()
        self._holders.check()
        self.cache.check(self._holders)
        assert len(self._in_flight) <= self._num_stages, len(self._in_flight)
        assert len(self._live) == len(self._waiting) + len(self._holders)
        for seq in self._holders:
            assert self._live[seq.request_id] is seq, seq.request_id

    def _make(self, request: Request, output_token_ids: TokenIds) -> Sequence:
        assert request.request_id not in self._live, f"{request.request_id} is here already"
        seq = make_sequence(
            request,
            output_token_ids,
            self._num_made,
            self._eos_token_ids,
            self._max_model_len,
            self._named_size,
        )
        self._num_made += 1
        self._live[request.request_id] = seq
        return seq

    @property
    def _frees_memory(self) -> bool:
        """Whether the next plan frees blocks, whatever it computes."""
        return bool(self._holders.released or self.is_evicting)
