"""Which rows of a batch ask the sampler for what, as tensors on the device.

They stay there while the same requests take their steps together. What differs from step to step,
points, places and bans, is sent anew.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kunserve.core.ids import RequestId
from kunserve.engine.sampling.sampler import RequestState, uniforms
from kunserve_extras.torch_body.draws import MOST_LISTED, Filters
from kunserve_extras.torch_body.histories import Penalties, together
from kunserve_extras.torch_body.pinned import Sender

Array = npt.NDArray[np.generic]

_MOST_PENALISED = 1 << 22
"""Tokens of histories that are looked at in one go."""
_WIDTH_STEP = 256
"""Histories are looked at in multiples of this, so that tensors have few shapes."""
_SEEDS = 1 << 64


@dataclass(slots=True, eq=False)
class DeviceRow:
    """A request whose tokens are chosen on the device."""

    state: RequestState
    num_output: int
    allowed_slot: int | None = None
    history_slot: int | None = None
    history_end: int = 0
    """Of its history without any output: the place of output token ``p`` is this and ``p``."""

    @property
    def has_edits(self) -> bool:
        """Whether single tokens of its logits are changed."""
        state = self.state
        has_words = state.bans is not None and state.bans.has_words
        return has_words or state.sampling.min_tokens > 0 or len(state.bias_ids) > 0

    @property
    def changes_logits(self) -> bool:
        """Whether they are not taken as they are."""
        return not self.state.is_plain

    def edits(self, position: int) -> tuple[list[npt.NDArray[np.int64]], list[Array]]:
        """Tokens, and what to add to their logits: minus infinity to those that are banned now."""
        state = self.state
        banned = [] if state.bans is None else [np.array(state.bans.word_ends(), dtype=np.int64)]
        if position < state.sampling.min_tokens:
            banned.append(state.early_ids)
        values: list[Array] = [np.full(len(ids), -np.inf) for ids in banned]
        return [*banned, state.bias_ids], [*values, state.bias.astype(np.float64)]


class Group:
    """Some rows of a batch, in rising order."""

    def __init__(self, rows: Sequence[int], num_rows: int) -> None:
        self.rows = rows
        self._are_all = len(rows) == num_rows
        self.index = torch.empty(0)
        """int64 [n] on the device, once it is sent."""

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of a tensor: itself if they are all, else a copy."""
        return tensor if self._are_all else tensor.index_select(0, self.index)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the rows of a tensor."""
        return tensor.clone() if self._are_all else self.of(tensor)

    def put(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write the rows of a tensor."""
        tensor.index_copy_(0, self.index, values)


@dataclass(frozen=True, slots=True, eq=False)
class Penalised:
    """Rows whose histories are looked at together."""

    asked: Penalties
    rows: tuple[DeviceRow, ...]
    indices: npt.NDArray[np.int64]
    """Of the rows in their batch."""
    ends: npt.NDArray[np.int64]

    def num_tokens(self, positions: npt.NDArray[np.int64]) -> int:
        """At least so many places have a token after the one at each row's position."""
        most = int((self.ends + positions[self.indices]).max()) + 1
        return -(-most // _WIDTH_STEP) * _WIDTH_STEP


class Batch:
    """The rows of a step, by what they ask for."""

    def __init__(
        self,
        request_ids: Sequence[RequestId],
        states: Sequence[RequestState | None],
        rows: Sequence[DeviceRow | None],
        vocab_size: int,
        sender: Sender,
    ) -> None:
        """``rows`` are None where the host chooses, or where the largest logit is all it takes."""
        self.request_ids, self.states, self.rows = request_ids, states, rows
        self._vocab_size = vocab_size

        def group(is_in: Callable[[DeviceRow], bool]) -> Group:
            found = [i for i, row in enumerate(rows) if row is not None and is_in(row)]
            return Group(found, len(rows))

        both = enumerate(zip(states, rows, strict=True))
        on_host = [i for i, (s, row) in both if s is not None and row is None and not s.is_argmax]
        self.on_host = Group(on_host, len(rows))
        """Those with a form."""
        self.changed = group(lambda row: row.changes_logits)
        self.scored = group(lambda row: row.state.sampling.num_logprobs is not None)
        self.allowed = group(lambda row: row.allowed_slot is not None)
        self.banned = group(lambda row: row.state.bans is not None)
        """Those that may lose all tokens."""
        self.drawn = group(lambda row: not row.state.is_greedy)
        self.listed = group(_is_listed)
        """Those of them that are chosen from their likeliest tokens."""
        self.whole = group(_is_whole)
        """Those of them that need the weights of all tokens."""
        self.place_in_whole = {row: place for place, row in enumerate(self.whole.rows)}
        self.sorted = {i for i in self.whole.rows if self._row(i).state.sampling.top_k is not None}
        """Those that certainly need all of them in order."""
        self.may_sort = bool(self.sorted) or any(
            row is not None and _is_whole(row) and _is_listed(row) for row in rows
        )
        """Whether some tokens may not be known before the host has looked."""
        self._edited = [i for i, row in enumerate(rows) if row is not None and row.has_edits]
        self._seeds = np.array(
            [0 if row is None else row.state.sampling.seed % _SEEDS for row in rows],
            dtype=np.uint64,
        )
        self.num_listed = max((self._num_listed(i) for i in self.listed.rows), default=0)
        self.num_scored = max(
            (self._row(i).state.sampling.num_logprobs or 0 for i in self.scored.rows), default=0
        )
        self.allowed_slots = torch.empty(0)
        self.listed_filters = self.whole_filters = Filters(*[torch.empty(0)] * 4)
        self.penalised: list[Penalised] = []
        self._send(sender)

    def positions_of(self, positions: Sequence[int]) -> npt.NDArray[np.int64]:
        """As an array. Each request's position is the number of its output tokens so far."""
        found = np.array(positions, dtype=np.int64)
        for part in self.penalised:
            for index, row in zip(part.indices.tolist(), part.rows, strict=True):
                assert row.num_output == positions[index], (row.num_output, positions[index])
                row.num_output += 1
        return found

    def of_step(self, positions: npt.NDArray[np.int64]) -> dict[str, Array]:
        """What is to be sent of one step."""
        arrays: dict[str, Array] = {
            f"at {number}": part.ends + positions[part.indices]
            for number, part in enumerate(self.penalised)
        }
        if self.drawn:
            arrays["points"] = uniforms(self._seeds, positions.astype(np.uint64))
        if self._edited:
            places: list[npt.NDArray[np.int64]] = []
            values: list[Array] = []
            for index in self._edited:
                ids, added = self._row(index).edits(int(positions[index]))
                places += [one + index * self._vocab_size for one in ids]
                values += added
            arrays["edited"], arrays["added"] = np.concatenate(places), np.concatenate(values)
        return arrays

    def _row(self, index: int) -> DeviceRow:
        row = self.rows[index]
        assert row is not None, index
        return row

    def _num_listed(self, index: int) -> int:
        top_k = self._row(index).state.sampling.top_k
        return MOST_LISTED if top_k is None else top_k

    def _send(self, sender: Sender) -> None:
        """Everything that stays alike, in one copy."""
        groups = (
            self.on_host, self.changed, self.scored, self.allowed, self.banned, self.drawn,
            self.listed, self.whole,
        )  # fmt: skip
        arrays: dict[str, Array] = {
            f"group {number}": np.array(one.rows, dtype=np.int64)
            for number, one in enumerate(groups)
        }
        arrays["allowed slots"] = np.array(
            [self._row(i).allowed_slot for i in self.allowed.rows], dtype=np.int64
        )
        for name, filtered in (("listed", self.listed), ("whole", self.whole)):
            arrays |= {f"{name} {key}": one for key, one in self._filters(filtered).items()}
        parts = self._penalised_parts()
        for number, indices in enumerate(parts):
            arrays |= {f"{number} {k}": one for k, one in self._penalties(indices).items()}
        sent = sender.send(arrays)
        for number, one in enumerate(groups):
            one.index = sent[f"group {number}"]
        self.allowed_slots = sent["allowed slots"]
        self.listed_filters = _filters_of(sent, "listed", self._has_min_p(self.listed))
        self.whole_filters = _filters_of(sent, "whole", self._has_min_p(self.whole))
        for number, indices in enumerate(parts):
            asked = Penalties(
                rows=sent[f"{number} rows"],
                slots=sent[f"{number} slots"],
                repetition=_float_column(sent[f"{number} repetition"]),
                frequency=_float_column(sent[f"{number} frequency"]),
                presence=_float_column(sent[f"{number} presence"]),
            )
            rows = tuple(map(self._row, indices))
            ends = np.array([row.history_end for row in rows], dtype=np.int64)
            which = np.array(indices, dtype=np.int64)
            self.penalised.append(Penalised(asked, rows, which, ends))

    def _has_min_p(self, group: Group) -> bool:
        return any(self._row(i).state.sampling.min_p > 0 for i in group.rows)

    def _filters(self, group: Group) -> dict[str, Array]:
        asked = [self._row(i).state.sampling for i in group.rows]
        most = self._vocab_size
        return {
            "temperature": np.array([one.temperature for one in asked], dtype=np.float64),
            "min_p": np.array([one.min_p for one in asked], dtype=np.float64),
            "top_k": np.array([one.top_k or most for one in asked], dtype=np.int64),
            "top_p": np.array([one.top_p for one in asked], dtype=np.float64),
        }

    def _penalised_parts(self) -> list[list[int]]:
        indices = [
            i for i, row in enumerate(self.rows) if row is not None and row.history_slot is not None
        ]
        ends = [self._row(i).history_end + self._row(i).num_output for i in indices]
        return [[indices[one] for one in part] for part in together(ends, _MOST_PENALISED)]

    def _penalties(self, indices: list[int]) -> dict[str, Array]:
        rows = [self._row(i) for i in indices]
        asked = [row.state.sampling for row in rows]
        return {
            "rows": np.array(indices, dtype=np.int64),
            "slots": np.array([row.history_slot for row in rows], dtype=np.int64),
            "repetition": np.array([one.repetition_penalty for one in asked], dtype=np.float64),
            "frequency": np.array([one.frequency_penalty for one in asked], dtype=np.float64),
            "presence": np.array([one.presence_penalty for one in asked], dtype=np.float64),
        }


def _is_listed(row: DeviceRow) -> bool:
    sampling = row.state.sampling
    if row.state.is_greedy:
        return False
    if sampling.top_k is None:
        return sampling.top_p < 1.0
    return sampling.top_k <= MOST_LISTED


def _is_whole(row: DeviceRow) -> bool:
    """``top_p`` alone is a share of all tokens."""
    top_k = row.state.sampling.top_k
    return not row.state.is_greedy and (top_k is None or top_k > MOST_LISTED)


def _filters_of(sent: dict[str, torch.Tensor], name: str, has_min_p: bool) -> Filters:
    return Filters(
        temperature=_float_column(sent[f"{name} temperature"]),
        min_p=_float_column(sent[f"{name} min_p"]) if has_min_p else None,
        top_k=sent[f"{name} top_k"][:, None],
        top_p=sent[f"{name} top_p"][:, None],
    )


def _float_column(values: torch.Tensor) -> torch.Tensor:
    """float32 [n, 1], which is what logits are."""
    return values.to(torch.float32)[:, None]
