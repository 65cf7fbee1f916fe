"""The sampler where logits lie on a device: tokens are chosen there, and only they come back.

A step takes one copy of what it asks for, calls whose number does not depend on the number of rows,
and one copy of tokens. Two kinds of rows take more: those with a form come to the host, which alone
knows grammars; and rows whose filters leave more than ``MOST_LISTED`` tokens are sorted whole,
after the others, because only the device can tell that they must be.

The rules are those of ``engine.sampling``; ``torch_body.draws`` says where a draw may differ. A
draw's point comes from the host, which knows it beforehand: (seed, position) give it, as everywhere
else, so a request draws the same tokens wherever it runs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kunserve.core.ids import RequestId
from kunserve.core.request import SamplingParams, TokenLogprobs
from kunserve.core.step import SampledToken, SequenceStart
from kunserve.core.tokens import TokenIds
from kunserve.engine.sampling.sampler import RequestState, Sampler, is_greedy, sample_row
from kunserve.engine.sampling.structured.forms import Forms
from kunserve_extras.torch_body.draws import (
    MOST_LISTED,
    likeliest,
    pick_by_id,
    pick_falling,
    pick_sorted,
    score,
    weights_of,
)
from kunserve_extras.torch_body.histories import AllowedTokens, Histories
from kunserve_extras.torch_body.pinned import Coming, Sender
from kunserve_extras.torch_body.row_groups import Batch, DeviceRow

ROWS_AT_ONCE = 256
"""Rows that one set of calls samples."""
ROWS_SORTED = 32
"""Rows that are sorted whole at once."""
_MOST_BATCHES = 16


class TorchSampler(Sampler):
    """A ``Sampler`` for logits on any device."""

    def __init__(
        self,
        eos_ids: Sequence[int],
        vocab_size: int,
        forms: Forms | None = None,
        device: torch.device | None = None,
    ) -> None:
        """``device`` is where the logits will lie; the CPU if none is named."""
        super().__init__(eos_ids, vocab_size, forms)
        device = device or torch.device("cpu")
        self._sender = Sender(device)
        self._allowed = AllowedTokens(vocab_size, device)
        self._histories = Histories(device)
        self._rows: dict[RequestId, DeviceRow] = {}
        self._batches: dict[tuple[RequestId, ...], Batch] = {}
        """Of the last steps, since a request came or went. Several stages have one each."""

    def warm_up(self) -> None:
        """Have torch load all that is used here, because a request would wait for it."""
        asked = (
            SamplingParams(1),
            SamplingParams(1, top_p=0.9, min_p=1e-9, allowed_token_ids=TokenIds([0])),
            SamplingParams(1, top_p=0.9, logit_bias=((0, 1.0),), num_logprobs=1),
            SamplingParams(1, top_k=2, repetition_penalty=1.1),
        )
        ids = tuple(RequestId(f"warm-up {number}") for number in range(len(asked)))
        for request_id, sampling in zip(ids, asked, strict=True):
            self.start(SequenceStart(request_id, sampling, 1, TokenIds([0])))
        logits = torch.zeros(len(ids), self._vocab_size, device=self._sender.device)
        sampled = self.sample(logits, ids, [0] * len(ids))
        assert all(one.token_id is not None for one in sampled), sampled
        for request_id in ids:
            self.forget(request_id)

    def forget(self, request_id: RequestId) -> None:
        """See ``Sampler.forget``."""
        super().forget(request_id)
        self._batches.clear()
        row = self._rows.pop(request_id, None)
        if row is not None and row.allowed_slot is not None:
            self._allowed.release(row.allowed_slot)
        if row is not None and row.history_slot is not None:
            self._histories.release(row.history_slot)

    def _state_of(self, start: SequenceStart) -> RequestState:
        state = super()._state_of(start)
        self._batches.clear()
        if state.form is not None or state.is_argmax:
            return state
        row = DeviceRow(state, num_output=0)
        if state.bans is not None and state.bans.forbidden is not None:
            row.allowed_slot = self._allowed.take(state.bans.forbidden)
        if state.history is not None:
            row.num_output = state.history.num_output
            row.history_slot = self._histories.take(state.history)
            row.history_end = len(state.history.ids) - row.num_output
            state.history = None  # the device has it, and goes on with it
        self._rows[start.request_id] = row
        return state

    def sample(
        self, logits: torch.Tensor, request_ids: Sequence[RequestId], positions: Sequence[int]
    ) -> tuple[SampledToken, ...]:
        """See ``Sampler.sample``."""
        return self.ask(logits, request_ids, positions)()

    def ask(
        self,
        logits: torch.Tensor,
        request_ids: Sequence[RequestId],
        positions: Sequence[int],
        found: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Callable[[], tuple[SampledToken, ...]]:
        """See ``Sampler.ask``."""
        asked = []
        for first in range(0, len(request_ids), ROWS_AT_ONCE):
            some = slice(first, first + ROWS_AT_ONCE)
            batch = self._batch_of(tuple(request_ids[some]))
            largest = None if found is None else (found[0][some], found[1][some])
            asked.append(self._ask_batch(batch, logits[some], positions[some], largest))
        self.asked = [one.tokens for one in asked]
        batches = [one.step.batch for one in asked]
        self.waits_for_host = any(batch.may_sort or batch.on_host for batch in batches)

        def take() -> tuple[SampledToken, ...]:
            sampled = tuple([token for one in asked for token in self._take_batch(one)])
            self._flush()
            return sampled

        return take

    def feed(
        self,
        places: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32] | None,
        sampled: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``Sampler.feed``. The known tokens go there too, behind those that were sampled."""
        at, parts = places.astype(np.int64), self.asked if sampled is None else [sampled]
        if token_ids is None:
            sent = self._sender.send({"at": at})
        else:
            is_known = places < 0
            known = token_ids[is_known].astype(np.int64)
            at[is_known] = np.arange(len(known)) + sum(len(part) for part in parts)
            sent = self._sender.send({"at": at, "known": known})
            parts = [*parts, sent["known"]]
        tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
        return tokens.index_select(0, sent["at"])

    def chooses_alone(self, sampling: SamplingParams) -> bool:
        """See ``Sampler.chooses_alone``. Not where the host must look at logits, or at what was
        drawn.
        """
        if sampling.structured is not None or sampling.bad_words:
            return False
        if is_greedy(sampling):
            return True
        top_k = sampling.top_k
        return sampling.top_p >= 1.0 if top_k is None else top_k <= MOST_LISTED

    def _batch_of(self, request_ids: tuple[RequestId, ...]) -> Batch:
        batch = self._batches.get(request_ids)
        if batch is None:
            if len(self._batches) == _MOST_BATCHES:
                self._batches.clear()
            states = [self._states.get(one) for one in request_ids]
            rows = [self._rows.get(one) for one in request_ids]
            batch = Batch(request_ids, states, rows, self._vocab_size, self._sender)
            self._batches[request_ids] = batch
        return batch

    def _ask_batch(
        self,
        batch: Batch,
        logits: torch.Tensor,
        positions: Sequence[int],
        found_before: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> "_Asked":
        assert logits.is_contiguous(), logits.stride()
        step = _Step(batch, self._sender, positions)
        # Among equals the first one, as torch promises.
        largest, tokens = logits.max(dim=1) if found_before is None else found_before
        is_sound = largest.isfinite()
        on_host = batch.on_host.copy_of(logits) if batch.on_host else None
        scored = batch.scored.copy_of(logits) if batch.scored else None
        if batch.changed:
            self._change(step, logits)
            largest, tokens = logits.max(dim=1)
            is_sound &= largest.isfinite()
        is_enough = torch.ones_like(is_sound)
        weights = _draw(step, logits, tokens, is_enough) if batch.drawn else None
        # The one copy that everybody waits for.
        found = torch.stack((tokens, is_sound.to(tokens.dtype), is_enough.to(tokens.dtype)))
        asked = _Asked(step, positions, tokens, Coming(found), weights, scored, on_host)
        if not batch.may_sort:
            self._follow(asked)
        return asked

    def _follow(self, asked: "_Asked") -> None:
        """What the device does with the tokens, once it has them all."""
        step, tokens = asked.step, asked.tokens
        for part, at in step.penalised:
            new = tokens.index_select(0, part.asked.rows)[:, None]
            self._histories.append(part.asked, part.num_tokens(step.positions), at, new)
        if asked.scored is not None:
            of_tokens = step.batch.scored.of(tokens)[:, None]
            asked.scores = Coming(score(asked.scored, of_tokens, step.batch.num_scored))

    def _take_batch(self, asked: "_Asked") -> Iterator[SampledToken]:
        batch, positions, on_host = asked.step.batch, asked.positions, asked.on_host
        chosen, sound, enough = asked.found.taken()
        if batch.may_sort:
            to_sort = [i for i in batch.whole.rows if i in batch.sorted or not enough[i]]
            if to_sort and asked.weights is not None:
                self._sort(asked.step, asked.weights, to_sort, asked.tokens)
                chosen = asked.tokens.tolist()
            self._follow(asked)
        logprobs = {} if asked.scores is None else _logprobs_of(batch, asked.scores.taken())
        rows_here = [] if on_host is None else on_host.cpu().numpy()
        by_row = dict(zip(batch.on_host.rows, rows_here, strict=True))
        for i, (request_id, state) in enumerate(zip(batch.request_ids, batch.states, strict=True)):
            if i in by_row or state is None or not sound[i]:
                with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                    row = by_row.get(i) if sound[i] else None
                    yield sample_row(request_id, row, state, positions[i])
                continue
            if state.bans is not None:
                state.bans.append(chosen[i])
            yield SampledToken(request_id, chosen[i], logprobs.get(i))

    def _change(self, step: "_Step", logits: torch.Tensor) -> None:
        """Bans, what is added to single tokens, and penalties."""
        batch, sent = step.batch, step.sent
        if batch.allowed:
            self._allowed.forbid_others(logits, batch.allowed.index, batch.allowed_slots)
        allowed = batch.banned.copy_of(logits) if batch.banned else None
        if "edited" in sent:
            logits.view(-1).index_add_(0, sent["edited"], sent["added"].to(logits.dtype))
        for part, _ in step.penalised:
            num_tokens = part.num_tokens(step.positions)
            self._histories.reserve(num_tokens)
            self._histories.penalise(logits, part.asked, num_tokens)
        if allowed is not None:
            # Where a client has forbidden everything, of its wishes only allowed tokens hold.
            changed = batch.banned.of(logits)
            is_gone = changed.amax(dim=1, keepdim=True) == -torch.inf
            batch.banned.put(logits, torch.where(is_gone, allowed, changed))

    def _sort(
        self, step: "_Step", weights: torch.Tensor, rows: list[int], tokens: torch.Tensor
    ) -> None:
        """Draw these rows from all of their tokens, put in order."""
        for first in range(0, len(rows), ROWS_SORTED):
            some = rows[first : first + ROWS_SORTED]
            places = [step.batch.place_in_whole[row] for row in some]
            sent = self._sender.send({"rows": np.array(some), "places": np.array(places)})
            which = weights.index_select(0, sent["places"])
            filters = step.batch.whole_filters.at(sent["places"])
            points = step.points.index_select(0, sent["rows"])
            tokens.index_copy_(0, sent["rows"], pick_sorted(which, filters, points)[:, 0])


class _Step:
    """One step of a batch, and what was sent for it."""

    def __init__(self, batch: Batch, sender: Sender, positions: Sequence[int]) -> None:
        self.batch = batch
        self.positions = batch.positions_of(positions)
        self.sent = sender.send(batch.of_step(self.positions))
        self.penalised = [
            (part, self.sent[f"at {number}"][:, None])
            for number, part in enumerate(batch.penalised)
        ]

    @property
    def points(self) -> torch.Tensor:
        """[n, 1] of each row; only in a batch that is drawn from."""
        return self.sent["points"][:, None]


@dataclass(slots=True)
class _Asked:
    """What the device was asked for, of some rows."""

    step: _Step
    positions: Sequence[int]
    tokens: torch.Tensor
    """[n] on the device."""
    found: Coming
    weights: torch.Tensor | None
    """As ``_draw`` gives them."""
    scored: torch.Tensor | None
    """A copy of the rows whose log-probabilities are asked for."""
    on_host: torch.Tensor | None
    """A copy of the rows whose tokens the host chooses."""
    scores: Coming | None = None


def _draw(
    step: _Step, logits: torch.Tensor, tokens: torch.Tensor, is_enough: torch.Tensor
) -> torch.Tensor | None:
    """Write the ``tokens`` of rows that are drawn, and whether the listed tokens were enough.

    Gives the weights of the rows that need those of all tokens. The logits are overwritten.
    """
    batch = step.batch
    totals = torch.zeros_like(tokens)[:, None]
    values = ids = logits[:0]
    if batch.listed:
        values, ids = likeliest(batch.listed.of(logits), batch.num_listed)
    weights = None
    if batch.whole:
        below = batch.whole.of(logits)
        below -= below.amax(dim=1, keepdim=True)
        filters = batch.whole_filters
        weights = weights_of(below, filters.temperature, filters.min_p)
        found, sums = pick_by_id(weights, batch.whole.of(step.points))
        batch.whole.put(tokens, found[:, 0])
        batch.whole.put(totals, sums)
    if batch.listed:
        filters = batch.listed_filters
        listed = weights_of(values - values[:, :1], filters.temperature, filters.min_p)
        points = batch.listed.of(step.points)
        place, are_all = pick_falling(listed, batch.listed.of(totals), filters, points)
        batch.listed.put(tokens, ids.gather(1, place)[:, 0])
        batch.listed.put(is_enough, are_all[:, 0])
    return weights


def _logprobs_of(batch: Batch, scores: list[list[float]]) -> dict[int, TokenLogprobs]:
    """By row. ``scores`` are those of the rows that ask for them."""
    most = (len(scores[0]) - 2) // 2
    found = {}
    for row, (logprob, rank, *rest) in zip(batch.scored.rows, scores, strict=True):
        state = batch.states[row]
        assert state is not None
        count = min(state.sampling.num_logprobs or 0, most)
        top = zip(map(int, rest[:count]), rest[most : most + count], strict=True)
        found[row] = TokenLogprobs(logprob, int(rank), tuple(top))
    return found
