"""Chooses each request's next token from its logits.

Order as in vLLM: log-probabilities are of the raw logits; then the form of a structured output,
where nothing else brings a forbidden token back; then ``allowed_token_ids``,
``bad_words``, ``min_tokens``, ``logit_bias`` and the penalties; then greedy, or temperature,
``min_p``, ``top_k``, ``top_p`` and a draw. Everything depends on the request's own row alone, so
batching and pipelining change nothing, and a request whose row cannot be sampled ends alone.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kunserve.core.ids import RequestId
from kunserve.core.request import SamplingParams, TokenLogprobs
from kunserve.core.step import LATE, SampledToken, SequenceStart
from kunserve.engine.cpu.kernels.ops import largest
from kunserve.engine.sampling.distribution import Row, draw, token_logprobs
from kunserve.engine.sampling.history import TokenHistory
from kunserve.engine.sampling.structured.forms import Form, Forms, MaskLate
from kunserve.engine.sampling.structured.grammar import FormError
from kunserve.engine.sampling.token_bans import TokenBans

logger = logging.getLogger(__name__)

_GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow."""
_MASK = (1 << 64) - 1
_Whole = TypeVar("_Whole", int, Any)
"""A number, or an array of uint64."""


@dataclass(slots=True)
class RequestState:
    """What is kept of a request between its tokens."""

    sampling: SamplingParams
    is_greedy: bool
    is_plain: bool
    """Whether its logits are used as they are."""
    is_argmax: bool
    """Whether the largest raw logit is all there is to know."""
    early_ids: npt.NDArray[np.int64]
    """Tokens forbidden before ``min_tokens``."""
    bias_ids: npt.NDArray[np.int64]
    bias: Row
    history: TokenHistory | None
    bans: TokenBans | None
    form: Form | None
    eos_ids: npt.NDArray[np.int64]
    """Tokens that end an output which has a form; empty without one."""

    @property
    def may_forbid_all(self) -> bool:
        """Whether what the client wishes may leave no token at all."""
        if self.bans is not None:
            return True
        sampling = self.sampling
        return self.form is not None and (sampling.ignore_eos or sampling.min_tokens > 0)


class Sampler:
    """Lives where the output head is. One entry per running request."""

    asked: Sequence[torch.Tensor] = ()
    """On the device: tokens [n] that were asked for last, in the order of their rows."""
    waits_for_host = False
    """Whether some of these are chosen, or used, only once the host has seen others: by what the
    device is asked for then, behind whatever else it was asked for."""

    def __init__(self, eos_ids: Sequence[int], vocab_size: int, forms: Forms | None = None) -> None:
        """Without ``forms`` a request for a structured output ends with an error."""
        self._eos_ids = tuple(eos_ids)
        self._vocab_size = vocab_size
        self._forms = forms
        self._states: dict[RequestId, RequestState] = {}
        self._take_largest: set[RequestId] = set()
        """Those of them for which the largest raw logit is all there is to know."""

    def prepare(self, sampling: SamplingParams) -> None:
        """Such a request is about to start: what can be done beside its first step begins now."""
        if self._forms is not None and sampling.structured is not None:
            self._forms.prepare(sampling.structured)

    def start(self, start: SequenceStart) -> None:
        """Know a request, replacing what was known of it.

        A request whose parameters cannot be used is not known: its first token is None.
        """
        self.forget(start.request_id)
        try:
            state = self._states[start.request_id] = self._state_of(start)
        except Exception:
            logger.exception("cannot prepare sampling, request=%s ends", start.request_id)
            return
        if state.is_argmax:
            self._take_largest.add(start.request_id)

    def forget(self, request_id: RequestId) -> None:
        """The request ended; unknown ones are no mistake."""
        state = self._states.pop(request_id, None)
        if state is not None and state.form is not None:
            state.form.close()
        self._take_largest.discard(request_id)

    def is_brief(self, request_ids: Iterable[RequestId]) -> bool:
        """Whether ``sample_largest`` is all that these need. Nearly always, and soon done."""
        return self._take_largest.issuperset(request_ids)

    def sample(
        self, logits: torch.Tensor, request_ids: Sequence[RequestId], positions: Sequence[int]
    ) -> tuple[SampledToken, ...]:
        """One token for each row of ``logits`` [n, vocab] float32, which is overwritten.

        ``positions`` are the tokens' indices among their request's output. The token is None
        where the row has a NaN or no finite maximum, or where sampling it fails; ``LATE`` where
        its form does not say in time what may come.
        """
        return self.sample_found(logits, request_ids, positions, *largest(logits))

    def ask(
        self,
        logits: torch.Tensor,
        request_ids: Sequence[RequestId],
        positions: Sequence[int],
        found: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Callable[[], tuple[SampledToken, ...]]:
        """As ``sample``, whose answer the call gives: a device may be asked for more before it.

        ``found``: of each row the largest logit and its place, where a device has them already.
        """
        sampled = self.sample(logits, request_ids, positions)
        return lambda: sampled

    def chooses_alone(self, sampling: SamplingParams) -> bool:
        """Whether ``feed`` may be called behind such a request's token, before it is here."""
        return False

    def feed(
        self,
        places: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32] | None,
        sampled: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """On the device, of the tokens that were ``sampled`` elsewhere, or asked for here last,
        those at these places [n]; where that is -1, those of ``token_ids`` [n].
        """
        raise AssertionError("tokens are on the host")

    def sample_found(
        self,
        logits: torch.Tensor,
        request_ids: Sequence[RequestId],
        positions: Sequence[int],
        values: Sequence[float],
        tokens: Sequence[int],
    ) -> tuple[SampledToken, ...]:
        """As ``sample``, where the largest of each row are known."""
        sampled: list[SampledToken] = []
        with contextlib.ExitStack() as stack:
            rows: npt.NDArray[np.float32] | None = None
            for i, request_id in enumerate(request_ids):
                state = self._states.get(request_id)
                is_sound = math.isfinite(values[i])
                if is_sound and state is not None and state.is_argmax:
                    sampled.append(SampledToken(request_id, tokens[i], None))
                    continue
                if rows is None:
                    rows = logits.numpy()
                    quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore")
                    stack.enter_context(quiet)
                row = rows[i] if is_sound else None
                sampled.append(sample_row(request_id, row, state, positions[i]))
        self._flush()
        return tuple(sampled)

    def sample_largest(
        self,
        values: Sequence[float],
        token_ids: Sequence[int],
        request_ids: Sequence[RequestId],
    ) -> tuple[SampledToken, ...]:
        """As ``sample``, of requests that take the largest logit, of which these are known."""
        states = self._states
        return tuple(
            [
                SampledToken(request_id, token, None)
                if math.isfinite(value) and request_id in states
                else sample_row(request_id, None, states.get(request_id), 0)
                for request_id, value, token in zip(request_ids, values, token_ids, strict=True)
            ]
        )

    def _flush(self) -> None:
        """All rows of a step are sampled: masks for the next one are computed from now on."""
        if self._forms is not None:
            self._forms.flush()

    def _state_of(self, start: SequenceStart) -> RequestState:
        sampling = start.sampling
        stops = sampling.stop_token_ids + (() if sampling.ignore_eos else self._eos_ids)
        bias = [pair for pair in sampling.logit_bias if 0 <= pair[0] < self._vocab_size]
        history = bans = form = None
        if sampling.has_penalties:
            history = TokenHistory(start.token_ids, start.num_prompt_tokens)
        if TokenBans.are_in(sampling):
            bans = TokenBans(start, self._vocab_size)
        if sampling.structured is not None:
            if self._forms is None:
                raise FormError("this body has no vocabulary for forms")
            form = self._forms.start(
                sampling.structured, start.token_ids[start.num_prompt_tokens :]
            )
        has_any = form is not None or history is not None or bans is not None or bool(bias)
        is_plain = not has_any and sampling.min_tokens == 0
        return RequestState(
            sampling=sampling,
            is_greedy=is_greedy(sampling),
            is_plain=is_plain,
            is_argmax=takes_largest(sampling),
            early_ids=_ids(token for token in stops if 0 <= token < self._vocab_size),
            bias_ids=_ids(token for token, _ in bias),
            bias=np.array([value for _, value in bias], dtype=np.float32),
            history=history,
            bans=bans,
            form=form,
            eos_ids=_ids(
                token for token in self._eos_ids if form and 0 <= token < self._vocab_size
            ),
        )


def is_greedy(sampling: SamplingParams) -> bool:
    """Whether nothing is drawn."""
    return sampling.temperature < _GREEDY_BELOW


def takes_largest(sampling: SamplingParams) -> bool:
    """Whether the largest raw logit of a row is all that such a request needs of it."""
    return (
        is_greedy(sampling)
        and sampling.num_logprobs is None
        and sampling.min_tokens == 0
        and sampling.structured is None
        and not (sampling.logit_bias or sampling.has_penalties or TokenBans.are_in(sampling))
    )


def sample_row(
    request_id: RequestId, row: Row | None, state: RequestState | None, position: int
) -> SampledToken:
    """One request's token. Whatever goes wrong ends this request and no other."""
    if state is None:
        return SampledToken(request_id, None, None)  # ``start`` has told why
    try:
        chosen = None if row is None else _choose(row, state, position)
    except MaskLate:
        return SampledToken(request_id, LATE, None)
    except FormError as error:
        logger.error("no token fits the form, request=%s ends: %s", request_id, error)
        return SampledToken(request_id, None, None)
    except Exception:
        logger.exception("sampling failed, request=%s ends", request_id)
        return SampledToken(request_id, None, None)
    if chosen is None:
        logger.error("no finite largest logit, request=%s ends", request_id)
        return SampledToken(request_id, None, None)
    return SampledToken(request_id, *chosen)


def _choose(
    row: Row, state: RequestState, position: int
) -> tuple[int, TokenLogprobs | None] | None:
    """The token and what is reported of it; None if its own parameters spoil the row."""
    sampling = state.sampling
    raw = row
    if not state.is_plain:
        keeps_raw = sampling.num_logprobs is not None or state.may_forbid_all
        raw = row.copy() if keeps_raw else row
        _adjust(row, state, position)
    token = int(row.argmax())
    if row[token] == -np.inf and state.may_forbid_all:
        # The client has forbidden everything: of its wishes form and allowed tokens hold.
        row[:] = raw
        if state.form is not None:
            np.add(row, state.form.mask(), out=row)
        if state.bans is not None:
            state.bans.allow_only(row)
        token = int(row.argmax())
    if not math.isfinite(row[token]):
        return None
    if not state.is_greedy:
        token = draw(row, sampling, uniform(sampling.seed, position))
    if state.history is not None:
        state.history.append(token)
    if state.bans is not None:
        state.bans.append(token)
    if state.form is not None and token not in state.eos_ids:
        state.form.append(token)
    if sampling.num_logprobs is None:
        return token, None
    return token, token_logprobs(raw, token, sampling.num_logprobs)


def _ids(values: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(values, dtype=np.int64)


def _adjust(row: Row, state: RequestState, position: int) -> None:
    """Apply everything that changes the logits [vocab] themselves, in place."""
    sampling = state.sampling
    if state.form is not None:
        np.add(row, state.form.mask(), out=row)
        if state.form.is_complete:
            return  # only the end is left, whatever else the client wishes
        if sampling.ignore_eos:
            row[state.eos_ids] = -np.inf
    if state.bans is not None:
        state.bans.allow_only(row)
        state.bans.forbid_words(row)
    if position < sampling.min_tokens:
        row[state.early_ids] = -np.inf
    np.add.at(row, state.bias_ids, state.bias)
    history = state.history
    if history is None:
        return
    assert history.num_output == position, (history.num_output, position)
    ids, counts = history.ids, history.output_counts
    seen = row[ids]
    if sampling.repetition_penalty != 1.0:
        penalty = np.float32(sampling.repetition_penalty)
        seen = np.where(seen > 0, seen / penalty, seen * penalty)
    seen -= np.float32(sampling.frequency_penalty) * counts
    seen -= np.float32(sampling.presence_penalty) * (counts > 0)
    row[ids] = seen


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for (seed, position): two rounds of splitmix64's finaliser."""
    return (_mix(_mix(seed) + position) >> 11) * 2.0**-53


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """``uniform`` of each. Seeds are those of requests, modulo 2 ** 64."""
    found: npt.NDArray[np.float64] = (_mix(_mix(seeds) + positions) >> 11) * 2.0**-53
    return found


def _mix(value: _Whole) -> _Whole:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
