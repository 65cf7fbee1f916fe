"""Which tokens a group computes next: continuous batching in the leader's process.

Sans-I/O: the driver asks for plans with ``schedule`` and brings results to ``complete``. The
scheduler counts blocks (``Ledger``); instances place them when they run the plans, in order.
"""

from bisect import insort
from collections.abc import Collection, Iterable
from operator import attrgetter

from kunserve.control.arrays import Int32Array
from kunserve.control.group.admission import Admission
from kunserve.control.group.batch_former import BatchFormer, collect_runnable
from kunserve.control.group.in_flight import InFlight
from kunserve.control.group.ledger import Ledger
from kunserve.control.group.load import SchedulerTotals, measure_load
from kunserve.control.group.migration import MigrationAccess
from kunserve.control.group.sequence import Progress, Sequence, WaitingQueue, make_sequence
from kunserve.control.group.swap import SwapSpace
from kunserve.core.config import SchedulerConfig
from kunserve.core.ids import GroupId, RequestId
from kunserve.core.load import LoadReport
from kunserve.core.messages import SequenceState, TokenOutput
from kunserve.core.request import Request
from kunserve.core.step import StepPlan, StepResult
from kunserve.policy.batch_form import FormationView, FormBatch, PromptWork
from kunserve.policy.relief import HostLink, Preemptible, choose_victim

_key_of = attrgetter("key")
_last_step_of = attrgetter("last_step")


class Scheduler:
    """Owner of a group's requests, from arrival to their last token.

    Running sequences are kept in order of arrival. A sequence is admitted with blocks for all its
    known tokens (so a prompt never runs out half-way) and grows block by block as it decodes;
    when a block is missing the latest arrival is preempted, keeping its place and its output: it
    is recomputed later, or swapped (``policy.relief``). With S stages up to S plans are in
    flight, and S times ``max_num_seqs`` sequences run: what S groups of one stage would run.
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
        host_link: HostLink | None = None,
    ) -> None:
        """``host_link`` None: nobody is swapped."""
        self._config = config
        self._group_id = group_id
        self._num_stages = num_stages
        self._block_size = block_size
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self.totals = SchedulerTotals() if totals is None else totals
        self._form_batch = BatchFormer(config) if form_batch is None else form_batch
        self._ledger = Ledger(capacity_blocks, config.watermark)
        self._largest_capacity = capacity_blocks
        self._may_preempt = True
        self._live: dict[RequestId, Sequence] = {}
        self._waiting = WaitingQueue(block_size)
        self._admission = Admission(config, num_stages, block_size, self._waiting, self._ledger)
        self.migration = MigrationAccess(
            block_size, self._live, self._waiting, self._ledger, self._note_change
        )
        self._swap = SwapSpace(host_link, config.cost, block_size, self._ledger)
        self._running: list[Sequence] = []
        """Running and stalled ones, in order of arrival."""
        self._flights = InFlight(group_id)
        self._released: list[RequestId] = []
        """For the next plan: what the stages hold and may free."""
        self._preemptions: list[tuple[RequestId, int]] = []
        self._num_added = 0
        self.is_memory_short = False
        """At the last ``schedule`` memory was what kept a request from being admitted or run."""
        self._found_nothing = False
        """The last ``schedule`` gave no plan, and nothing has happened since."""
        self._last_progress_s: float | None = None

    # Requests come and go

    def add(self, request: Request) -> None:
        """Queue a request by its arrival (ties by order of coming), output so far included."""
        seq = self._make(request, request.output_token_ids)
        needed = self._blocks_for(len(seq.token_ids))
        assert needed <= self._largest_capacity, f"{request.request_id} can never fit"
        self._waiting.add(seq)

    def adopt(self, states: Iterable[SequenceState], stalled: Collection[RequestId] = ()) -> None:
        """Take sequences handed over by the group's former leaders, at a commit.

        Those with KV run on at once, but the ``stalled`` ones only after ``resume``.
        """
        for state in states:
            seq = self._make(state.request, state.output_token_ids)
            seq.num_preemptions = state.num_preemptions
            if state.num_computed == 0:
                self._waiting.add(seq)
                continue
            seq.num_computed = state.num_computed
            seq.state = Progress.STALLED if seq.request_id in stalled else Progress.RUNNING
            self._ledger.hold(seq.request_id, self._blocks_for(state.num_computed))
            insort(self._running, seq, key=_key_of)

    def export(self) -> tuple[SequenceState, ...]:
        """Hand everything live over, in order of arrival, and be empty. What is swapped is lost.

        Called between steps. Blocks that no plan has released yet are not named: whoever takes
        over frees whatever belongs to no handed-over sequence.
        """
        assert not self._flights, f"{len(self._flights)} steps in flight"
        for seq in self._swap.clear():
            self._lose_kv(seq)
        ordered = sorted(self._live.values(), key=_key_of)
        states = tuple(seq.hand_over(self._block_size) for seq in ordered)
        self._ledger.clear()
        self._waiting.clear()
        self._live.clear()
        self._running.clear()
        self._released.clear()
        return states

    def resume(self, request_id: RequestId) -> None:
        """The request's KV has arrived. Unknown ids are allowed: it may be aborted already."""
        seq = self._live.get(request_id)
        if seq is not None and seq.state is Progress.STALLED:
            seq.state = Progress.RUNNING
            self._found_nothing = False

    def abort(self, request_id: RequestId) -> bool:
        """Forget the request, whatever it is doing; False if it is unknown (or has ended)."""
        seq = self._live.pop(request_id, None)
        if seq is None:
            return False
        if seq.state is Progress.WAITING:
            self._waiting.remove(seq)
        else:
            self._leave(seq)
            self._free(seq)
        seq.state = Progress.ENDED
        self._found_nothing = False
        return True

    def set_capacity(self, blocks: int) -> None:
        """The group's KV memory is ``blocks`` from now on; it may be less than what is used."""
        self._ledger.capacity_blocks = blocks
        self._largest_capacity = max(self._largest_capacity, blocks)
        self._found_nothing = False

    @property
    def may_preempt(self) -> bool:
        """False during an exchange: what does not fit then waits instead of preempting."""
        return self._may_preempt

    @may_preempt.setter
    def may_preempt(self, allowed: bool) -> None:
        self._may_preempt = allowed
        self._found_nothing = False

    # Steps

    def schedule(self, now_s: float) -> StepPlan | None:
        """The next microbatch, or None when nothing can run now.

        May be called again before ``complete``. Every plan returned must be run by all stages,
        in order, and completed; one without chunks only frees blocks.
        """
        if len(self._flights) >= self._num_stages:
            return None
        self._note_work(now_s)
        for seq in self._swap.settle() if self._swap else ():
            seq.state = Progress.RUNNING
            insort(self._running, seq, key=_key_of)
        decodes, prompts, num_awaiting, context_in_flight = collect_runnable(self._running)
        unfit = self._secure(decodes, prompts)
        num_waiting = len(self._waiting)
        self.is_memory_short = unfit is not None
        if unfit is not None:
            # Memory is short: nobody is admitted, and who did not get a block sits out.
            decodes = [s for s in decodes if s.state is Progress.RUNNING and s not in unfit]
            prompts = [s for s in prompts if s.state is Progress.RUNNING and s not in unfit]
        else:
            admissible = self._admissible(prompts)
            prompts.extend(admissible)
            num_waiting -= len(admissible)
            self.is_memory_short = self._admission.lacks_memory
        config = self._config
        if self._num_stages > 1 or len(decodes) > config.max_num_batched_tokens:
            decodes.sort(key=_last_step_of)
        batch = self._form_batch(
            FormationView(
                decodes=[seq.num_computed for seq in decodes],
                prompts=[PromptWork(seq.num_computed, seq.num_left) for seq in prompts],
                num_decodes_in_flight=num_awaiting,
                num_in_flight=len(self._flights),
                num_stages=self._num_stages,
                max_num_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
                context_in_flight=context_in_flight,
                has_backlog=num_waiting > 0,
            )
        )
        chosen = [(decodes[index], 1) for index in batch.decodes]
        for index, num_tokens in batch.prompts:
            seq = prompts[index]
            if seq.state is Progress.WAITING:
                self._admit(seq, now_s)
            chosen.append((seq, num_tokens))
        if not chosen and (self._flights or not (self._released or self._swap.may_copy)):
            self._found_nothing = True
            return None
        released, self._released = self._released, []
        return self._flights.launch(released, chosen, *self._swap.plan_copies(chosen))

    def complete(self, result: StepResult, now_s: float) -> list[TokenOutput]:
        """Take a step's sampled tokens; the outputs to stream, with ends detected."""
        assert result.group_id == self._group_id, (result.group_id, self._group_id)
        flight = self._flights.land(result.step_id)
        pool_tokens = self._largest_capacity * self._block_size
        outputs: list[TokenOutput] = []
        num_ended = num_failed = 0
        for (request_id, token_id, logprobs), seq in zip(
            result.tokens, flight.sampling, strict=True
        ):
            if seq is None:
                continue
            assert request_id == seq.request_id, (request_id, seq.request_id)
            position = seq.num_output
            reason = seq.take(token_id, pool_tokens)
            num_failed += token_id is None
            queued_s = seq.queued_s if position == 0 else None
            outputs.append(TokenOutput(request_id, position, token_id, logprobs, reason, queued_s))
            if reason is not None:
                num_ended += 1
                self._end(seq)
        if num_ended:
            ended = Progress.ENDED
            self._running = [s for s in self._running if s.state is not ended]
        self.totals.generation_tokens += len(outputs) - num_failed
        self.totals.prompt_tokens += flight.num_prompt_tokens
        self._found_nothing = False
        self._last_progress_s = now_s if self.has_work else None
        return outputs

    def token_ids_of(self, plan: StepPlan) -> Int32Array:
        """The plan's input tokens, chunk after chunk, while it is in flight (for stage 0)."""
        return self._flights.token_ids_of(plan)

    # Seen from outside

    @property
    def num_in_flight(self) -> int:
        """Plans whose results have not come."""
        return len(self._flights)

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold or have reserved."""
        return self._ledger.used_blocks

    @property
    def has_work(self) -> bool:
        """Whether anything is in flight, runs, waits or must be released (stalled ones do not)."""
        running = Progress.RUNNING
        for seq in self._running:
            if seq.state is running:
                return True
        return bool(self._flights or self._waiting or self._swap or self._released)

    @property
    def can_schedule(self) -> bool:
        """Whether ``schedule`` may give a plan: false after it did not, until something happens."""
        return not self._found_nothing and len(self._flights) < self._num_stages and self.has_work

    def load(self, sequence_number: int, num_received: int, now_s: float) -> LoadReport:
        """The group's load, about ten times a second."""
        self._note_work(now_s)
        since = self._last_progress_s
        return measure_load(
            self._group_id,
            sequence_number,
            num_received,
            self._live.values(),
            self._waiting,
            self._ledger,
            self.totals,
            self._block_size,
            stuck_s=0.0 if since is None else max(0.0, now_s - since),
        )

    def drain_preemptions(self) -> list[tuple[RequestId, int]]:
        """(request, tokens of KV lost) of each preemption since the last call, for the log."""
        drained, self._preemptions = self._preemptions, []
        return drained

    def check(self) -> None:
        """Assert that sequences, queue, ledger and flights agree."""
        self._ledger.check()
        self._waiting.check()
        self._swap.check()
        assert len(self._live) == len(self._waiting) + len(self._running) + len(self._swap)
        keys = [seq.key for seq in self._running]
        assert keys == sorted(set(keys)), keys
        assert len(self._flights) <= self._num_stages, len(self._flights)
        kept = [*self._running, *self._swap]
        self._flights.check(kept)
        reserved = self._ledger.migrating_blocks
        for seq in kept:
            blocks = self._ledger.blocks_of(seq.request_id)
            reserved += blocks
            is_swapped = seq.state is Progress.SWAPPED
            assert is_swapped or seq.state in (Progress.RUNNING, Progress.STALLED), seq
            assert is_swapped or blocks >= self._blocks_for(seq.num_computed), (seq, blocks)
            assert self._live[seq.request_id] is seq, seq.request_id
            assert 0 <= seq.num_computed <= len(seq.token_ids), seq
            assert seq.num_left > 0 or seq.is_awaiting, seq
        assert reserved == self._ledger.used_blocks, (reserved, self._ledger.used_blocks)

    # Inside a step

    def _secure(
        self, decodes: Iterable[Sequence], prompts: Iterable[Sequence]
    ) -> set[Sequence] | None:
        """Get blocks for all known tokens of these; who could not, or None if memory sufficed.

        Only a decode at a block's edge, and a prompt adopted half-way, ever lacks one.
        """
        block_size, ledger = self._block_size, self._ledger
        edge = [s for s in decodes if s.num_computed % block_size == 0]
        unfit: set[Sequence] | None = None
        for seq in sorted([*edge, *prompts], key=_key_of):
            needed = -(-len(seq.token_ids) // block_size)
            if seq.state is not Progress.RUNNING or ledger.grow(seq.request_id, needed):
                continue
            unfit = set() if unfit is None else unfit
            if not self._relieve(seq, needed):
                unfit.add(seq)
        return unfit

    def _relieve(self, grower: Sequence, num_blocks: int) -> bool:
        """Preempt until the grower fits; False if it must wait."""
        while self._may_preempt:
            if self._swap.makes_room(grower, num_blocks):
                return False
            running = [seq for seq in self._running if seq.state is Progress.RUNNING]
            running += self._swap.returning
            victim = choose_victim([Preemptible(*s.key) for s in running], running.index(grower))
            if victim is None:
                return False
            self._preempt(running[victim])
            if self._ledger.grow(grower.request_id, num_blocks):
                return True
        return False

    def _admissible(self, prompts: Iterable[Sequence]) -> list[Sequence]:
        """Who may be admitted now behind these running prompts; the swapped come back in turn."""
        room = self._admission.room(len(self._running))
        if self._swap:
            head = self._waiting.head
            room -= self._swap.recall(None if head is None else head.key, room)
        num_tokens_ahead = sum(seq.num_left for seq in prompts)
        return self._admission.candidates(room, num_tokens_ahead, self._swap.first_away)

    def _admit(self, seq: Sequence, now_s: float) -> None:
        self._admission.admit(seq)
        seq.state = Progress.RUNNING
        if seq.queued_s is None:
            seq.queued_s = now_s - seq.request.arrival_s
        insort(self._running, seq, key=_key_of)

    def _make(self, request: Request, output_token_ids: tuple[int, ...]) -> Sequence:
        assert request.request_id not in self._live, f"{request.request_id} is here already"
        seq = make_sequence(
            request, output_token_ids, self._num_added, self._eos_token_ids, self._max_model_len
        )
        self._num_added += 1
        self._live[request.request_id] = seq
        self._found_nothing = False
        return seq

    def _preempt(self, seq: Sequence) -> None:
        """Take a sequence's memory: all at once, or as fast as it can be swapped."""
        if not self._swap.push_out(seq):
            self._leave(seq)
            self._free(seq)
            self._lose_kv(seq)
        elif seq.state is Progress.RUNNING:
            self._note_preemption(seq, 0)
            self._running.remove(seq)
            seq.state = Progress.SWAPPED

    def _lose_kv(self, seq: Sequence) -> None:
        """The sequence, in no list any more, must be computed again."""
        self._note_preemption(seq, seq.num_computed)
        seq.num_computed = 0
        seq.is_started = False
        seq.state = Progress.WAITING
        self._waiting.add(seq)

    def _note_preemption(self, seq: Sequence, lost_tokens: int) -> None:
        self._preemptions.append((seq.request_id, lost_tokens))
        self.totals.note_preemption(lost_tokens)
        seq.num_preemptions += 1

    def _leave(self, seq: Sequence) -> None:
        """Take a sequence with KV out of where it is kept."""
        if seq.state is Progress.SWAPPED:
            self._swap.drop(seq)
        else:
            self._running.remove(seq)

    def _end(self, seq: Sequence) -> None:
        """The sequence finished by itself. The caller takes it out of the running list."""
        self.totals.note_finished(seq.num_output)
        del self._live[seq.request_id]
        if seq.state is Progress.SWAPPED:
            self._swap.drop(seq)
        self._free(seq)
        seq.state = Progress.ENDED

    def _free(self, seq: Sequence) -> None:
        """Give blocks back; a token still in flight will be ignored."""
        self._ledger.release(seq.request_id)
        self._released.append(seq.request_id)
        self._flights.ignore(seq)

    def _note_change(self) -> None:
        self._found_nothing = False

    def _note_work(self, now_s: float) -> None:
        """Remember since when there has been work without a completed step."""
        if not self.has_work:
            self._last_progress_s = None
        elif self._last_progress_s is None:
            self._last_progress_s = now_s

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
