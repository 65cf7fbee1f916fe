"""One stage's part of an output head that a pipeline's stages compute together, on the CPU."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kunserve.core.ids import RequestId
from kunserve.core.layout import VocabRange
from kunserve.core.snapshots import HeadShape
from kunserve.core.step import SequenceStart
from kunserve.engine.attention import TORCH_DTYPES, capped
from kunserve.engine.cpu.decoder import scaled
from kunserve.engine.cpu.ends import HeadCall, Largest, can_be_fused
from kunserve.engine.cpu.hidden_rows import Hidden, rows_of, tensor_of
from kunserve.engine.cpu.kernels.ops import Finish, largest_pairs, linear, rms_norm
from kunserve.engine.layer_weights import ModelWeights
from kunserve.engine.sampling.sampler import takes_largest
from kunserve.model.spec import ModelSpec

Part = npt.NDArray[np.float32]
"""[n, rows of the vocabulary] logits. Or [n, 2], where nobody needs more: each row's largest logit
and the token that has it."""
_BRIEF = 2
_FEW_ROWS = 8
LEADER_WEIGHTS = 3_500_000
"""Planning and sampling take the leader about as long as these take eight rows: 0.7 ms."""
Room = Callable[[int, int], torch.Tensor]
"""Gives float32 [rows, width]."""


def head_shape(spec: ModelSpec) -> HeadShape | None:
    """What the head costs beside layers: of few tokens, the time to read the weights.

    None for a vocabulary whose parts could not be told from brief ones.
    """
    if not 16 <= spec.vocab_size < 1 << 24:  # float32 holds every token
        return None
    layer_params = spec.read_params(_FEW_ROWS)
    if spec.packed is None:
        cost_layers = spec.vocab_size * spec.hidden_size / layer_params
    else:
        head_bytes = spec.embedding_bytes if spec.tied_embeddings else spec.head_bytes
        cost_layers = head_bytes / spec.layer_bytes * spec.layer_params / layer_params
    leader_layers = min(LEADER_WEIGHTS / layer_params, cost_layers / 8)
    return HeadShape(spec.vocab_size, cost_layers, leader_layers)


class SplitHead:
    """Computes parts on every stage, and joins them on the first one.

    Where all requests of a microbatch take the largest raw logit, a part says which one that is:
    eight bytes of a row instead of a hundred thousand.
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights, room: Room = torch.empty) -> None:
        """``room`` gives memory that is used until its next call, and saves taking it anew."""
        self._room = room
        self._spec = spec
        self._weights = weights
        self._take_largest: set[RequestId] = set()
        self._is_fused = can_be_fused(spec, weights.head)
        self._head: HeadCall | None = None
        """Made when it is needed first: where a GPU computes, there may be no kernels."""

    def start(self, start: SequenceStart) -> None:
        """Know a request."""
        if takes_largest(start.sampling):
            self._take_largest.add(start.request_id)
        else:
            self.forget(start.request_id)

    def forget(self, request_id: RequestId) -> None:
        """The request ended; unknown ones are no mistake."""
        self._take_largest.discard(request_id)

    def is_brief(self, request_ids: Iterable[RequestId]) -> bool:
        """Whether all of them take the largest logit."""
        return self._take_largest.issuperset(request_ids)

    def part(
        self,
        request_ids: Iterable[RequestId],
        vocab: VocabRange,
        hidden: Hidden,
    ) -> torch.Tensor | Part:
        """Of ``hidden`` [n, hidden] that the last layer gave, a row of each of these requests."""
        is_brief = self.is_brief(request_ids)
        if self._is_fused and is_brief:
            if self._head is None:
                self._head = HeadCall(self._spec, self._weights.final_norm, self._weights.head)
            return self._head.largest(rows_of(hidden), vocab, self._room)
        rows = tensor_of(hidden, TORCH_DTYPES[self._spec.dtype])
        offset = int(self._spec.has_offset_norms)
        normed = rms_norm(rows, self._weights.final_norm, self._spec.rms_eps, offset=offset)
        scaled(normed, self._spec.logit_scale)
        head = self._weights.head[vocab.first : vocab.end]
        if not is_brief:
            return capped(linear(normed, head, finish=Finish.FLOAT), self._spec.logit_cap)
        out = self._room(len(rows), vocab.num_rows)
        capped(linear(normed, head, out=out, finish=Finish.FLOAT), self._spec.logit_cap)
        return largest_pairs(out, vocab.first)


def part_of(data: memoryview | torch.Tensor | Part, num_rows: int) -> Part:
    """A part as it came: from another process, or from this one."""
    if isinstance(data, np.ndarray):
        return data
    if isinstance(data, torch.Tensor):
        part: Part = data.numpy()
        return part
    return np.frombuffer(data, dtype=np.float32).reshape(num_rows, -1)


def join_logits(parts: Sequence[Part], which: Sequence[int]) -> torch.Tensor:
    """The whole logits [n, vocab] of some rows, from whole parts in the order of the vocabulary."""
    assert all(part.shape[1] != _BRIEF for part in parts), [part.shape for part in parts]
    if len(which) < len(parts[0]):
        parts = [part[list(which)] for part in parts]
    return torch.from_numpy(np.concatenate(parts, axis=1))


def join_largest(
    parts: Sequence[tuple[int, memoryview | torch.Tensor | Part]],
    which: Sequence[int],
    num_rows: int,
) -> Largest:
    """The largest logit of some rows and its token; the lowest of equal ones wins.

    ``parts``, of ``num_rows`` each, begin at these rows of the vocabulary. A stage that has
    forgotten a request which is not among these rows gives whole logits: they hold all that is
    needed.
    """
    brief = [_pairs_of(data, first, num_rows) for first, data in parts]
    values, token_ids = [], []
    for row in which:
        value, token_id = brief[0][row]
        for part in brief[1:]:
            other = part[row]
            # A NaN counts as the largest, as the sampler takes it.
            if other[0] > value or (other[0] != other[0] and value == value):
                value, token_id = other
        values.append(value)
        token_ids.append(int(token_id))
    return Largest(values, token_ids)


def _pairs_of(
    data: memoryview | torch.Tensor | Part, first: int, num_rows: int
) -> list[list[float]]:
    """Each row's largest logit and its token. Of brief parts without numpy: behind a step that is
    slow.
    """
    if not isinstance(data, torch.Tensor):
        view = data if isinstance(data, memoryview) else data.data
        if view.nbytes == num_rows * _BRIEF * 4:
            pairs: Any = view.cast("B").cast("f", (num_rows, _BRIEF)).tolist()
            return list(pairs)
    part = part_of(data, num_rows)
    brief = part if part.shape[1] == _BRIEF else _largest(part, first)
    return list(brief.tolist())


def _largest(logits: Part, first: int) -> Part:
    tokens = logits.argmax(axis=1)
    values = logits[np.arange(len(logits)), tokens]
    return np.stack((values, (tokens + first).astype(np.float32)), axis=1)
