"""A body without a model, whose tokens still depend on every byte of KV memory.

The "transformer" is integer arithmetic: at layer l a token stores ``content = mix(hidden, l)`` in
its slot of unit ``entry + l`` and attends by summing the contents of its request's positions
0..p, or of those in the layer's window; the sum goes into the hidden state. So KV that is lost,
stale or misplaced, a layer that runs twice or not at all, or a sampling parameter that got lost
changes the tokens, while batching, chunking, block size and the split into stages change nothing.
Memory is bytes too: weights that are not held or not loaded, and units beyond the backed tail, fail
an assertion when used.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Self

import numpy as np
import numpy.typing as npt

from kunserve.control.arrays import Int32Array
from kunserve.control.instance.body import (
    HeadWork,
    HostCopy,
    Remap,
    SampleWork,
    StepOutcome,
    StepWork,
    UnitCopy,
)
from kunserve.core.ids import GroupId, InstanceId, RequestId, StepId
from kunserve.core.kv_blocks import KvRing
from kunserve.core.layout import LayerRange
from kunserve.core.prompt_scores import PromptScores, pack_scores
from kunserve.core.request import SamplingParams, TokenLogprobs
from kunserve.core.snapshots import HeadShape, InstanceSpec
from kunserve.core.step import LATE, SampledToken, SequenceStart
from kunserve.transport.bulk.movable_memory import WriteGate
from kunserve_lab.world.at_once import ComputesAtOnce
from kunserve_lab.world.fake_host import GARBAGE, FakeHost
from kunserve_lab.world.fake_model import (
    EMBED,
    FACTOR_1,
    FakeModel,
    Uint64Array,
    draw,
    expected_scores,
    expected_tokens,
    hidden_from_bytes,
    hidden_to_bytes,
    mix,
    mix_one,
    score_row,
    true_weights,
)
from kunserve_lab.world.viewed_memory import ViewedMemory

__all__ = ["FakeBody", "FakeModel", "expected_scores", "expected_tokens", "fake_spec"]

Uint8Array = npt.NDArray[np.uint8]
Board = dict[tuple[GroupId, StepId], tuple[SampledToken, ...]]
"""What steps have sampled, for those that run ahead: one for all instances, as memory that their
devices share."""
CONTENT_BYTES = 8
"""KV of one token at one layer."""


def fake_spec(
    instance_id: InstanceId,
    num_layers: int,
    kv_units: int,
    block_size: int = 4,
    layer_bytes: int = 256,
    granule_bytes: int = 32,
    head: HeadShape | None = None,
    kv_ring: KvRing | None = None,
) -> InstanceSpec:
    """An instance with memory for all layers and ``kv_units`` units of KV."""
    unit_bytes = block_size * CONTENT_BYTES
    weights = -(-num_layers * layer_bytes // granule_bytes) * granule_bytes
    return InstanceSpec(
        instance_id=instance_id,
        num_layers=num_layers,
        block_size=block_size,
        unit_bytes=unit_bytes,
        layer_bytes=layer_bytes,
        memory_bytes=weights + kv_units * unit_bytes,
        kv_units=kv_units,
        granule_bytes=granule_bytes,
        head=head,
        kv_ring=kv_ring,
    )


class FakeBody(ComputesAtOnce, ViewedMemory):
    """Implements ``control.instance.body.Body`` and ``Memory``, and what a mover needs."""

    computes_aside = False
    maps_when_idle = True
    tidied_s = 0.0
    num_pieces = 1
    """In which memory is prepared. It is refused with the last."""
    num_late_steps = 0
    """Copies to host memory and back are made behind so many."""

    def __init__(
        self,
        spec: InstanceSpec,
        model: FakeModel,
        delay: Callable[[StepWork], float] | None = None,
    ) -> None:
        """``delay`` gives the seconds that a step takes, where real time matters."""
        assert spec.unit_bytes == spec.block_size * CONTENT_BYTES, spec
        assert spec.num_layers == model.num_layers, (spec, model)
        self._spec = spec
        self._model = model
        self._delay = delay
        most = spec.memory_bytes // spec.unit_bytes
        self._kv: Uint64Array = np.empty((most, spec.block_size), dtype=np.uint64)
        self._kv.view(np.uint8).fill(GARBAGE)
        self._weights: Uint8Array = np.zeros((spec.num_layers, spec.layer_bytes), dtype=np.uint8)
        self._whole = LayerRange(0, spec.num_layers)
        self.held = self._whole
        self.kv_units = spec.kv_units
        self._pieces_left = 0
        self.prepared: LayerRange | None = None
        """Layers that the next remap will hold, if it was prepared."""
        self.refusal: str | None = None
        """What the next preparations answer, for tests of memory that cannot be mapped."""
        self._unverified = set(range(spec.num_layers))
        """Layers whose bytes may have changed since a step last used them."""
        self._starts: dict[RequestId, SequenceStart] = {}
        self._history: dict[RequestId, list[int]] = {}
        self._late: set[RequestId] = set()
        self.board: Board = {}
        self.host = FakeHost(self)
        self.load_layers(self._whole)

    @property
    def layer_bytes(self) -> int:
        """Of one layer's weights."""
        return self._spec.layer_bytes

    @property
    def spec(self) -> InstanceSpec:
        """What the instance is made of."""
        return self._spec

    @property
    def memory(self) -> Self:
        """See ``Body``. Its books are the body's."""
        return self

    @property
    def known_requests(self) -> set[RequestId]:
        """Requests that the body keeps anything of, for tests that look for leaks."""
        return set(self._starts)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of any request."""
        return not self._starts and self.host.num_bytes == 0

    # Steps

    def execute(
        self,
        work: StepWork,
        hidden: Uint64Array | None,
        look_up: Callable[[], None] | None = None,
    ) -> StepOutcome:
        """Run the stage's layers over the microbatch; ``look_up`` is called once, half-way."""
        self._verify_weights(work.layers)
        for start in work.plan.started:
            self._starts[start.request_id] = start
            self._history[start.request_id] = list(start.token_ids)
        assert (hidden is None) == work.is_first, work.plan
        if hidden is None:
            hidden = self._embed(work)
        assert hidden.shape == (work.plan.num_tokens,), (hidden.shape, work.plan)
        offset = 0
        outputs = np.empty_like(hidden)
        for chunk, row in zip(work.plan.chunks, work.rows.tolist(), strict=True):
            assert chunk.request_id in self._starts, f"{chunk.request_id} was never started"
            end = offset + chunk.num_tokens
            outputs[offset:end] = self._run_chunk(
                hidden[offset:end], work.tables[row], chunk.start, work.layers
            )
            offset = end
        if look_up is not None:
            look_up()
        self.host.step()
        if self._delay is not None:
            time.sleep(self._delay(work))
        if not work.is_last:
            return StepOutcome(outputs, ())
        scores = tuple(self._score(work, outputs)) if work.plan.scored else ()
        ends = np.cumsum([chunk.num_tokens for chunk in work.plan.chunks])
        counts = [chunk.num_sampled for chunk in work.plan.chunks]
        rows = outputs[[i for e, n in zip(ends, counts, strict=True) for i in range(e - n, e)]]
        if work.gives_rows:
            return StepOutcome(rows, (), scores)
        tokens = tuple(self._sample(work, rows))
        self.board[work.plan.group_id, work.plan.step_id] = tokens
        return StepOutcome(None, tokens, scores)

    def feeds_back(self, sampling: SamplingParams) -> bool:
        """As a device does, but for what only its host knows."""
        return sampling.structured is None

    def head_part(self, work: HeadWork, rows: Uint64Array) -> Uint64Array:
        """Which part it is, and the rows: enough to see that nothing is missing or mixed up."""
        assert rows.shape == (work.plan.num_sampled,), (rows.shape, work.plan)
        return np.concatenate((np.array(work.rows, dtype=np.uint64), rows))

    def sample(self, work: SampleWork) -> tuple[SampledToken, ...]:
        """The tokens, once all parts of the vocabulary are there."""
        parts = [(named, np.frombuffer(part, dtype=np.uint64)) for named, part in work.parts]
        first, rows = 0, parts[0][1][2:]
        for named, part in parts:
            assert named == part[0] == first < part[1], work
            assert np.array_equal(part[2:], rows), work
            first = int(part[1])
        assert first == self._model.vocab_size, work
        return tuple(self._sample(work, rows))

    def _embed(self, work: StepWork) -> Uint64Array:
        token_ids = work.token_ids
        if work.feeds is not None:
            assert work.feeds_on is not None, work.plan
            sampled = self.board.get((work.plan.group_id, work.feeds_on), ())
            fed = [0 if n < 0 else sampled[n].token_id for n in work.feeds.tolist()]
            token_ids = np.array(fed, dtype=np.int32) + (0 if token_ids is None else token_ids)
        assert token_ids is not None and len(token_ids) == work.plan.num_tokens
        positions = np.concatenate(
            [np.arange(c.start, c.start + c.num_tokens) for c in work.plan.chunks]
        )
        tokens = token_ids.astype(np.uint64)
        return mix(tokens * np.uint64(FACTOR_1) + positions.astype(np.uint64), EMBED)

    def _run_chunk(
        self, hidden: Uint64Array, entries: Int32Array, start: int, layers: LayerRange
    ) -> Uint64Array:
        if len(hidden) == 1:
            return np.array([self._run_token(int(hidden[0]), entries, start, layers)], np.uint64)
        block_size = self._spec.block_size
        end = start + len(hidden)
        positions = np.arange(start, end)
        for layer in range(*layers):
            window = self._model.window_of(layer)
            units = self._units(entries, -(-end // block_size), layer)
            assert units.min() >= 0 and units.max() < self.kv_units, (units, self.kv_units)
            self._kv[units[positions // block_size], positions % block_size] = mix(
                hidden, 2 * layer
            )
            sums = np.cumsum(self._kv[units].reshape(-1)[:end])
            seen = sums[start:]
            if window is not None and end > window:
                unseen = np.concatenate((np.zeros(window, dtype=np.uint64), sums[:-window]))
                seen = seen - unseen[start:]
            hidden = mix(hidden + np.uint64(3) * seen, 2 * layer + 1)
        return hidden

    def _run_token(self, hidden: int, entries: Int32Array, start: int, layers: LayerRange) -> int:
        """``_run_chunk`` of one token, as most are: arrays take five times as long."""
        block_size = self._spec.block_size
        end = start + 1
        for layer in range(*layers):
            window = self._model.window_of(layer)
            units = self._units(entries, -(-end // block_size), layer)
            assert units.min() >= 0 and units.max() < self.kv_units, (units, self.kv_units)
            self._kv[units[-1], start % block_size] = mix_one(hidden, 2 * layer)
            first = 0 if window is None else max(0, end - window)
            seen = int(self._kv[units].reshape(-1)[first:end].sum())
            hidden = mix_one(hidden + 3 * seen, 2 * layer + 1)
        return hidden

    def _units(self, entries: Int32Array, num: int, layer: int) -> Int32Array:
        """Where a layer has each ``block_size`` tokens of a context."""
        blocks = self._spec.blocks
        if blocks.ring is None:
            return entries[:num] + layer
        if self._model.window_of(layer) is not None:
            return entries[[blocks.local_block(number) for number in range(num)]] + layer
        places = [blocks.global_place(number) for number in range(num)]
        units = [entries[block] + layer - before for block, before in places]
        return np.array(units, dtype=np.int32)

    def _score(self, work: StepWork, hidden: Uint64Array) -> Iterator[PromptScores]:
        row_of, end = {}, 0
        for chunk in work.plan.chunks:
            row_of[chunk.request_id] = end - chunk.start
            end += chunk.num_tokens
        for request_id, first, last in work.plan.scored:
            prompt, offset = self._starts[request_id].token_ids, row_of[request_id]
            rows = [
                score_row(int(hidden[offset + position]), prompt[position + 1])
                for position in range(first, last)
            ]
            yield pack_scores(request_id, first, 1, rows)

    def _sample(self, work: StepWork | SampleWork, rows: Uint64Array) -> Iterator[SampledToken]:
        skipped = work.skipped if isinstance(work, SampleWork) else ()
        for (request_id, num_before), hidden in zip(
            work.plan.sampled_rows, rows.tolist(), strict=True
        ):
            if request_id in skipped:
                yield SampledToken(request_id, None, None)
                continue
            start, history = self._starts[request_id], self._history[request_id]
            position = num_before - start.num_prompt_tokens
            if start.sampling.structured is not None and position % 3 == 1:
                self._late ^= {request_id}  # each such token comes at the second try
                if request_id in self._late:
                    yield SampledToken(request_id, LATE, None)
                    continue
            value = draw(hidden, start.sampling, position, history)
            token_id = value % self._model.vocab_size
            if start.sampling.needs_history:
                history.append(token_id)
            wants_logprobs = start.sampling.num_logprobs is not None
            logprobs = TokenLogprobs(-1.0, 1, ((token_id, -1.0),)) if wants_logprobs else None
            yield SampledToken(request_id, token_id, logprobs)

    def forget(self, request_id: RequestId) -> None:
        """Drop per-request state; unknown ones are no mistake."""
        self._starts.pop(request_id, None)
        self._history.pop(request_id, None)
        self._late.discard(request_id)
        self.host.forget(request_id)

    # Memory

    def copy_units(self, copies: tuple[UnitCopy, ...]) -> None:
        """Copy in order."""
        for src, dst, num_units in copies:
            assert num_units > 0 and abs(src - dst) >= num_units, (src, dst, num_units)
            self.unit_view(dst, num_units)[:] = self.unit_view(src, num_units)

    def swap_units(
        self, out: tuple[HostCopy, ...], back: tuple[HostCopy, ...], *, beside_step: bool
    ) -> None:
        """Copy at once, or late."""
        self.host.ask(out, back, self.num_late_steps if beside_step else 0)

    @property
    def is_copying(self) -> bool:
        """Whether steps run before copies that were asked for."""
        return self.host.is_late

    def end_copies(self) -> None:
        """Do what is late."""
        self.host.end()

    def prepare(self, layers: LayerRange) -> str | None:
        """Answer as the test wants it."""
        if layers == self.held:
            self.prepared, self._pieces_left = None, 0
            return None
        if self.prepared != layers:
            self.prepared, self._pieces_left = layers, self.num_pieces
        self._pieces_left = max(0, self._pieces_left - 1)
        if self._pieces_left or self.refusal is None:
            return None
        self.prepared = None
        return self.refusal

    @property
    def is_preparing(self) -> bool:
        """Whether pieces are left."""
        return self._pieces_left > 0

    def drop(self, keep: LayerRange) -> Remap:
        """Turn the granules wholly outside ``keep`` into KV memory."""
        assert self.held.covers(keep) and keep.num_layers > 0, (self.held, keep)
        return self._hold(keep)

    def reclaim(self, layers: LayerRange) -> Remap:
        """Turn the KV tail into memory for ``layers``, its content undefined."""
        assert layers.covers(self.held), (self.held, layers)
        return self._hold(layers)

    def load_layers(self, layers: LayerRange, gate: WriteGate | None = None) -> None:
        """Fill mapped layers from "disk"."""
        assert self.held.covers(layers), (self.held, layers)
        for layer in range(*layers):
            if gate is None:
                self._load(layer)
            else:
                gate(self._spec.layer_bytes, functools.partial(self._load, layer))

    def _load(self, layer: int) -> None:
        self._weights[layer] = true_weights(layer, self._spec.layer_bytes)
        self._unverified.add(layer)

    def _hold(self, layers: LayerRange) -> Remap:
        spec, before = self._spec, self.kv_units
        self.kv_units = spec.backed_units(layers)
        self._kv[min(before, self.kv_units) :].view(np.uint8).fill(GARBAGE)
        kept = self.held.intersect(layers)
        for layer in range(spec.num_layers):
            if not kept.first <= layer < kept.end:
                self._weights[layer].fill(GARBAGE)
                self._unverified.add(layer)
        assert not (self.is_preparing and self.prepared == layers), "it was not prepared"
        self.held, self.prepared, self._pieces_left = layers, None, 0
        return Remap(self.kv_units, (self.kv_units - before) * spec.unit_bytes, 0.0)

    def _verify_weights(self, layers: LayerRange) -> None:
        assert self.held.covers(layers), f"layers {layers} are not held, only {self.held}"
        for layer in self._unverified.intersection(range(*layers)):
            true = true_weights(layer, self._spec.layer_bytes)
            assert np.array_equal(self._weights[layer], true), f"layer {layer} is not loaded"
            self._unverified.discard(layer)

    # What movers use

    def unit_view(self, unit: int, num_units: int) -> Uint8Array:
        """The bytes of consecutive KV units."""
        assert unit >= 0 and unit + num_units <= self.kv_units, (unit, num_units, self.kv_units)
        view: Uint8Array = self._kv[unit : unit + num_units].reshape(-1).view(np.uint8)
        return view

    def layer_view(self, layer: int) -> Uint8Array:
        """The bytes of a held layer's weights, to read or to fill."""
        assert self.held.first <= layer < self.held.end, (layer, self.held)
        self._unverified.add(layer)
        view: Uint8Array = self._weights[layer]
        return view

    def fill_kv(
        self, layers: LayerRange, into: Int32Array, source: "FakeBody", given: Int32Array
    ) -> None:
        """Copy blocks of another instance, over some layers."""
        first, num_layers = layers.first, layers.num_layers
        for src, dst in zip(given.tolist(), into.tolist(), strict=True):
            view = self.unit_view(dst + first, num_layers)
            view[:] = source.unit_view(src + first, num_layers)

    def fill_layers(self, layers: LayerRange, source: "FakeBody | None") -> None:
        """Copy another instance's weights, or load them."""
        if source is None:
            self.load_layers(layers)
            return
        for layer in range(*layers):
            self.layer_view(layer)[:] = source.layer_view(layer)

    hidden_to_bytes = staticmethod(hidden_to_bytes)
    hidden_from_bytes = staticmethod(hidden_from_bytes)
