"""A real instance: its memory, its weights, and the steps it runs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from kunserve.control.instance.body import (
    HeadWork,
    HostCopy,
    SampleWork,
    StepOutcome,
    StepWork,
)
from kunserve.core.config import InstanceConfig, ModelConfig, SchedulerConfig
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.kv_blocks import KvRing
from kunserve.core.layout import LayerRange
from kunserve.core.request import SamplingParams
from kunserve.core.snapshots import InstanceSpec
from kunserve.core.step import SampledRow, SampledToken
from kunserve.engine.asked import Asked
from kunserve.engine.attention import TORCH_DTYPES
from kunserve.engine.backend import Backend, CpuBackend
from kunserve.engine.cpu.decoder import FusedDecoder, StepBatch
from kunserve.engine.cpu.ends import Largest
from kunserve.engine.cpu.hidden_rows import Hidden, HiddenRows, rows_of, tensor_of
from kunserve.engine.cpu.split_head import (
    Part,
    SplitHead,
    head_shape,
    join_largest,
    join_logits,
    part_of,
)
from kunserve.engine.host_kv import ask_copies
from kunserve.engine.memory.account import account_of, check_length
from kunserve.engine.memory.free_memory import beside_bytes
from kunserve.engine.memory.memory import Memory
from kunserve.engine.memory.ring_tables import RingTables
from kunserve.engine.sampling.prompt_scorer import PromptScorer
from kunserve.engine.sampling.structured.forms import Forms
from kunserve.engine.sampling.structured.vocabulary import open_vocabulary
from kunserve.engine.step_batch import build_batch, entry_bounds
from kunserve.engine.step_bounds import most_of_any_step, step_limits
from kunserve.engine.ways_ahead import WaysAhead
from kunserve.engine.weights.readers import open_reader
from kunserve.model.config import read_eos_ids
from kunserve.model.sharding import spread_over_ranks
from kunserve.model.source import ModelSource, resolve_model
from kunserve.model.vocabulary import tokenizer_json
from kunserve.transport.bulk.movable_memory import WriteGate


class EngineBody:
    """Implements ``control.instance.body.Body``. One step at a time, called from one thread.

    ``source`` saves looking the model up again where the caller has done so. ``scheduler`` bounds
    the steps, whose memory is then reserved at once; without it buffers grow with the steps.
    ``backend`` says where memory lies and what computes. With a ``ring`` layers with a window keep
    no more than that of their KV. At most ``host_bytes`` of KV are ever in host memory, if known.
    """

    def __init__(
        self,
        instance_id: InstanceId,
        model: ModelConfig,
        instance: InstanceConfig,
        source: ModelSource | None = None,
        scheduler: SchedulerConfig | None = None,
        backend: Backend | None = None,
        ring: KvRing | None = None,
        host_bytes: int | None = None,
    ) -> None:
        started = time.perf_counter()
        # The kernels have threads of their own. torch's would meet at a barrier after each of the
        # many small conversions of a load: ten times slower where cores are shared.
        torch.set_num_threads(1)
        source = source or resolve_model(model.model, model.load_format)
        self._backend = backend = backend or CpuBackend()
        self.model = backend.shape(source, model)
        self.model = spread_over_ranks(self.model, instance)
        self._maps_when_idle = instance.map_when_idle
        most = most_of_any_step(self.model, model, scheduler)
        instance = backend.settle(self.model, instance, most)
        limits = step_limits(self.model, instance, ring, most)
        reader = open_reader(source, self.model, model.seed)
        buffer_bytes = backend.buffer_bytes(self.model, limits)
        self.memory: Memory = backend.open_memory(instance_id, self.model, instance, buffer_bytes)
        self._spec = replace(self.memory.spec, kv_ring=ring)
        try:
            check_length(self.model, self._spec, model.max_model_len)
            weights = backend.weights(self.memory, self.model)
            self._loader = backend.loader(reader, self.model, self.memory, weights)
            self._loader.check()
            self._loader.load_ends()
            self._loader.load_layers(self.memory.shards[0].held)
            self._decoder = backend.decoder(self.model, weights, self.memory, instance)
            self._decoder.reserve(limits)
        except BaseException:
            self.memory.close()
            raise
        eos_ids = read_eos_ids(source)
        self._forms = Forms(
            lambda: open_vocabulary(
                tokenizer_json(source, model.tokenizer), self.model.vocab_size, eos_ids
            )
        )
        self._sampler = backend.sampler(eos_ids, self.model.vocab_size, self._forms)
        self._scorer = PromptScorer(self._decoder)
        self._split_head = SplitHead(self.model, weights, self._decoder.room_for_logits)
        self._row_bytes = backend.hop_rows * self.model.hidden_size * self.model.dtype_bytes
        if backend.splits_head:
            self._spec = replace(self._spec, head=head_shape(self.model))
        self._blocks = self._spec.blocks
        self._ring_tables = None if ring is None else RingTables(self._blocks)
        self._prompt_tokens: dict[RequestId, int] = {}
        self._host = backend.host_kv(self.memory, host_bytes)
        load_s = time.perf_counter() - started
        beside = beside_bytes(self.other_pids)
        buffer_bytes = self._decoder.buffer_bytes
        self.account = account_of(self.memory, self._spec, self.model, buffer_bytes, beside, load_s)

    @property
    def ahead(self) -> WaysAhead:
        """Past hosts to other stages."""
        return self._backend.ahead

    @property
    def computes_aside(self) -> bool:
        """Whether the host is free while a step is computed."""
        return self._backend.computes_aside

    @property
    def maps_when_idle(self) -> bool:
        """Whether memory is mapped between steps only, and not beside them."""
        return self._maps_when_idle

    @property
    def spec(self) -> InstanceSpec:
        """What the instance is made of."""
        return self._spec

    @property
    def other_pids(self) -> tuple[int, ...]:
        """Processes of the instance beside this one."""
        return self._backend.other_pids

    def execute(
        self,
        work: StepWork,
        hidden: Hidden | None,
        look_up: Callable[[], None] | None = None,
    ) -> StepOutcome:
        """Run the stage's layers over the microbatch; ``hidden`` [T, hidden] is overwritten.

        ``look_up``, if given, is called between layers, or while a device computes them. It may
        change any memory but that of the microbatch's own blocks.
        """
        batch = self._begin(work)
        if look_up is None and (decoder := self._fused_for(work)) is not None:
            if work.is_first and work.is_last:
                return self._execute_whole(work, batch, decoder)
            return self._execute_stage(work, batch, hidden, decoder)
        return self.collect(self._ask(work, batch, hidden, look_up), look_up)

    def launch(
        self, work: StepWork, hidden: Hidden | None, look_up: Callable[[], None] | None = None
    ) -> Asked:
        """Begin what ``execute`` does, and ``collect`` ends: the device has been asked for all.

        A step that ``feeds`` on the one before may be launched before that is collected.
        """
        batch, fed = self._begin(work), None
        if work.awaits_tokens:
            assert work.feeds is not None and work.feeds_on is not None
            fed = self.ahead.read_tokens(work.feeds_on, 1 + int(work.feeds.max()))
        if work.feeds is not None:
            sampled = None if fed is None else fed.tokens
            batch.fed = self._sampler.feed(work.feeds, work.token_ids, sampled)
        return self._ask(work, batch, hidden, look_up)._replace(fed=fed)

    def feeds_back(self, sampling: SamplingParams) -> bool:
        """Whether steps may run ahead of such a request's tokens."""
        return self._may_run_ahead and self._sampler.chooses_alone(sampling)

    def reads_ahead(self, hidden: Hidden) -> bool:
        """Whether a step may now be launched that reads these of the stage before."""
        if self._sampler.waits_for_host:  # its tokens would wait for that step
            return False
        return self._may_run_ahead and isinstance(hidden, HiddenRows) and hidden.may_come_later

    @property
    def _may_run_ahead(self) -> bool:
        aliases = self.memory.shards[0].arena.num_aliases
        return self._backend.runs_ahead and not (aliases or self._host.is_copying)

    def _begin(self, work: StepWork) -> StepBatch:
        """The step's batch, and memory as the step expects it."""
        if not work.is_ahead:  # else the step before may still read
            if self.memory.shards[0].arena.num_aliases:
                self._host.wait()  # nothing is unmapped beside copies
            for shard in self.memory.shards:
                shard.tidy()
            self._host.begin()
        batch = build_batch(work, rows_are_alike=self._backend.rows_are_alike)
        bounds = entry_bounds(batch, self._blocks)
        own = self.memory.shards[0]  # the others are alike
        assert own.backs(bounds, work.layers), (own.held, work.layers, bounds)
        if self._ring_tables is not None:
            batch = self._ring_tables.spread(batch)
        self._decoder.set_layers(work.layers)
        return batch

    def _ask(
        self,
        work: StepWork,
        batch: StepBatch,
        hidden: Hidden | None,
        look_up: Callable[[], None] | None,
    ) -> Asked:
        assert (hidden is None) == work.is_first, work.is_first
        take = self._ask_whole(work, batch, look_up)
        if take is not None:
            return Asked(work, batch, None, None, None, take, self._backend.mark())
        if hidden is None:
            states = self._decoder.embed(batch)
        else:
            states = tensor_of(hidden, TORCH_DTYPES[self.model.dtype]).to(self._backend.device)
        if self._samples(work):
            for start in work.plan.started:
                self._sampler.prepare(start.sampling)
        states = self._decoder.forward(batch, states, look_up)
        self._start(work)
        if work.is_last and not work.gives_rows:
            take = self._sample(work, batch, states)
        return Asked(work, batch, hidden, None, states, take or tuple, self._backend.mark())

    def _ask_whole(
        self, work: StepWork, batch: StepBatch, look_up: Callable[[], None] | None
    ) -> Callable[[], tuple[SampledToken, ...]] | None:
        """As ``_ask`` by one graph, if there is one from tokens to the largest logits."""
        is_other = not (work.is_first and work.is_last) or work.gives_rows or work.plan.scored
        decoder = None if is_other else self._decoder.recorded
        asked = None if decoder is None else decoder.ask_whole(batch)
        if asked is None:
            return None
        if look_up is not None:
            look_up()
        for start in work.plan.started:  # beside the layers
            self._sampler.prepare(start.sampling)
        self._start(work)
        logits, found = asked
        return self._sampler.ask(logits, *self._positions(work.plan.sampled_rows), found)

    def await_input(self, asked: Asked, look_up: Callable[[], None] | None = None) -> bool:
        """Return when other stages have written what the step reads; False if they never will."""
        return asked.await_input(look_up)

    def write_ahead(self, asked: Asked, to: str) -> memoryview | None:
        """As ``hidden_to_bytes`` of what the step will give, if the peer can wait for that.

        Before another step is launched.
        """
        if asked.states is None or asked.work.is_last:
            return None
        return self.ahead.give_ahead(asked.states, to)

    def write_tokens(self, asked: Asked, to: str) -> memoryview | None:
        """Have the device write the step's tokens where the leader's next ones read them.

        What tells where goes with the tokens. Before another step is launched.
        """
        plan = asked.work.plan
        if not (asked.work.is_last and plan.samples):
            return None
        return self.ahead.write_tokens(self._sampler.asked, to, plan.group_id, plan.step_id)

    def collect(self, asked: Asked, look_up: Callable[[], None] | None = None) -> StepOutcome:
        """What a step gave that was launched, once it is computed. In the order of launches.

        Raises StepVoid for one whose input never came.
        """
        work, batch, states = asked.work, asked.batch, asked.states
        asked.wait(look_up)
        if not work.is_last:
            return StepOutcome(states, ())
        scores = self._scorer.score(work.plan, batch, states) if work.plan.scored else ()
        if not work.gives_rows:
            return StepOutcome(None, asked.take(), scores)
        assert states is not None
        if len(batch.sample_rows) < len(states):
            states = states.index_select(0, torch.from_numpy(batch.sample_rows))
        return StepOutcome(states, (), scores)

    def _fused_for(self, work: StepWork) -> FusedDecoder | None:
        """What computes the step in one call, if anything does."""
        if work.plan.scored:
            return None
        # Where stages do not share the head, the last one of several goes part by part.
        is_whole = work.is_first and work.is_last
        return self._decoder.fused if work.shares_head != is_whole or not work.is_last else None

    def _execute_stage(
        self,
        work: StepWork,
        batch: StepBatch,
        hidden: Hidden | None,
        decoder: FusedDecoder,
    ) -> StepOutcome:
        if self._samples(work):
            for start in work.plan.started:
                self._sampler.prepare(start.sampling)
        rows = decoder.run_fused(batch, None if hidden is None else rows_of(hidden))
        self._start(work)
        if not work.is_last:
            return StepOutcome(rows, ())
        if not work.gives_rows:
            return StepOutcome(None, ())
        if len(batch.sample_rows) < rows.num_rows:
            rows = rows.picked(batch.sample_rows)
        return StepOutcome(rows, ())

    def _execute_whole(
        self, work: StepWork, batch: StepBatch, decoder: FusedDecoder
    ) -> StepOutcome:
        for start in work.plan.started:
            self._sampler.prepare(start.sampling)
        logits, found = decoder.run_whole(batch)
        self._start(work)
        request_ids = work.plan.sampled_requests
        if self._sampler.is_brief(request_ids):
            return StepOutcome(None, self._sampler.sample_largest(*found, request_ids))
        return StepOutcome(None, self._sample_rows(logits, work.plan.sampled_rows, found))

    def _start(self, work: StepWork) -> None:
        """Know the requests whose first chunk this is, as far as this stage must."""
        for start in work.plan.started:
            if work.is_last:
                self._scorer.start(start)
            if work.shares_head:
                self._split_head.start(start)
            if self._samples(work):
                self._sampler.start(start)
                self._prompt_tokens[start.request_id] = start.num_prompt_tokens

    @staticmethod
    def _samples(work: StepWork) -> bool:
        """Whether this stage chooses the step's tokens."""
        return work.is_first if work.shares_head else work.is_last

    def _sample(
        self, work: StepWork, batch: StepBatch, hidden: torch.Tensor
    ) -> Callable[[], tuple[SampledToken, ...]]:
        wanted = work.plan.sampled_rows
        if not wanted:
            return tuple
        logits = self._decoder.logits(batch, hidden)
        return self._sampler.ask(logits, *self._positions(wanted))

    def _sample_rows(
        self, logits: torch.Tensor, wanted: Sequence[SampledRow], found: Largest | None = None
    ) -> tuple[SampledToken, ...]:
        if found is None:
            return self._sampler.sample(logits, *self._positions(wanted))
        return self._sampler.sample_found(logits, *self._positions(wanted), *found)

    def _positions(self, wanted: Sequence[SampledRow]) -> tuple[list[RequestId], list[int]]:
        """Of each row its request, and how many of its tokens are output."""
        positions = [row.num_before - self._prompt_tokens[row.request_id] for row in wanted]
        return [row.request_id for row in wanted], positions

    def head_part(self, work: HeadWork, rows: Hidden) -> torch.Tensor | Part:
        """See ``Body``."""
        return self._split_head.part(work.plan.sampled_requests, work.rows, rows)

    def sample(self, work: SampleWork) -> tuple[SampledToken, ...]:
        """See ``Body``."""
        everyone, skipped = work.plan.sampled_requests, work.skipped
        which = [i for i, request_id in enumerate(everyone) if request_id not in skipped]
        request_ids = [everyone[i] for i in which]
        if self._split_head.is_brief(request_ids):
            found = join_largest(work.parts, which, len(everyone))
            tokens = self._sampler.sample_largest(*found, request_ids)
        else:
            parts = [part_of(data, len(everyone)) for _, data in work.parts]
            all_rows = work.plan.sampled_rows
            tokens = self._sample_rows(join_logits(parts, which), [all_rows[i] for i in which])
        if len(which) == len(everyone):
            return tokens
        by_place = dict(zip(which, tokens, strict=True))
        return tuple(
            by_place.get(i) or SampledToken(request_id, None, None)
            for i, request_id in enumerate(everyone)
        )

    def forget(self, request_id: RequestId) -> None:
        """Drop what sampling and host memory keep of a request; unknown ones are no mistake."""
        self._sampler.forget(request_id)
        self._scorer.forget(request_id)
        self._split_head.forget(request_id)
        self._prompt_tokens.pop(request_id, None)
        self._host.forget(request_id)

    def swap_units(
        self, out: tuple[HostCopy, ...], back: tuple[HostCopy, ...], *, beside_step: bool
    ) -> None:
        """See ``Body``. What runs beside steps begins with the next one."""
        ask_copies(self._host, out, back)
        if not beside_step:
            self.end_copies()

    @property
    def is_copying(self) -> bool:
        """See ``Body``."""
        return self._host.is_copying

    def end_copies(self) -> None:
        """See ``Body``."""
        self._host.begin()
        self._host.wait()

    def load_layers(self, layers: LayerRange, gate: WriteGate | None = None) -> None:
        """Fill mapped layers from disk; what is written passes the ``gate``, if there is one."""
        held = self.memory.shards[0].held
        assert held.covers(layers), (held, layers)
        self._loader.load_layers(layers, gate)

    def hidden_to_bytes(self, hidden: Hidden | Part, to: str = "") -> memoryview:
        """The bytes for the wire. Keep ``hidden`` unchanged until they are sent."""
        return self._backend.give(hidden, to)

    def hidden_from_bytes(self, data: bytes | bytearray | memoryview) -> HiddenRows:
        """Activations [T, hidden] from the wire, which ``execute`` overwrites.

        No copy if ``data`` is writable.
        """
        return self._backend.take(data, self._row_bytes)

    def check(self) -> None:
        """Assert that no memory is lost or used twice."""
        self.memory.check(ask_kernel=True)

    def close(self) -> None:
        """Release the memory. The body must not be used any more."""
        self._forms.close()
        self._host.close()
        self.memory.close()
