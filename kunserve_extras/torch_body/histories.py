"""The tokens that penalties look at, kept on the device for as long as their requests run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kunserve.engine.sampling.history import TokenHistory

_FIRST_SLOTS = 16
_FIRST_ROOM = 1024
HISTORY_BYTES = 8
"""Of each token that a history has room for."""


class Slots:
    """Rows of tables on the device: which of them are free."""

    def __init__(self) -> None:
        self.num_slots = 0
        self._free: list[int] = []

    def take(self) -> int:
        """A free row; there are more of them afterwards if there was none."""
        if not self._free:
            more = max(_FIRST_SLOTS, self.num_slots)
            self._free = list(range(self.num_slots, self.num_slots + more))[::-1]
            self.num_slots += more
        return self._free.pop()

    def release(self, slot: int) -> None:
        """It is free again."""
        assert slot not in self._free and slot < self.num_slots, (slot, self.num_slots)
        self._free.append(slot)


class AllowedTokens:
    """Of each slot a mask of all tokens but the allowed ones."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._slots = Slots()
        self.release = self._slots.release
        self._is_forbidden = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def take(self, is_forbidden: npt.NDArray[np.bool_]) -> int:
        """A slot that has this mask [vocab]."""
        slot = self._slots.take()
        self._is_forbidden = _with_rows(self._is_forbidden, self._slots.num_slots)
        self._is_forbidden[slot].copy_(torch.from_numpy(is_forbidden))
        return slot

    def forbid_others(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Make the logits of all but the allowed tokens minus infinity, in these rows."""
        is_forbidden = self._is_forbidden.index_select(0, slots)
        allowed = logits.index_select(0, rows).masked_fill_(is_forbidden, -torch.inf)
        logits.index_copy_(0, rows, allowed)


@dataclass(frozen=True, slots=True)
class Penalties:
    """What some rows ask for, and where their histories lie: each [n] on the device."""

    rows: torch.Tensor
    """Of the logits."""
    slots: torch.Tensor
    repetition: torch.Tensor
    """float32 [n, 1], as the other two."""
    frequency: torch.Tensor
    presence: torch.Tensor


class Histories:
    """Of each slot the tokens of one request, each once, and how often each was output.

    What a slot has beyond its tokens are copies of the first one with its count. They are changed
    with it, so whatever is written to a token of the logits is the same from all of them, and
    nothing has to know where the tokens end.
    """

    def __init__(self, device: torch.device) -> None:
        self._slots = Slots()
        self.release = self._slots.release
        self._ids = torch.zeros(0, _FIRST_ROOM, dtype=torch.int32, device=device)
        self._counts = torch.zeros(0, _FIRST_ROOM, device=device)

    def take(self, history: TokenHistory) -> int:
        """A slot that has this history."""
        slot, num_tokens = self._slots.take(), len(history.ids)
        assert num_tokens > 0, "a request without a token"
        self._ids = _with_rows(self._ids, self._slots.num_slots)
        self._counts = _with_rows(self._counts, self._slots.num_slots)
        self.reserve(num_tokens)
        room = self._ids.shape[1]
        ids = np.full(room, history.ids[0], dtype=np.int32)
        counts = np.full(room, history.output_counts[0], dtype=np.float32)
        ids[:num_tokens], counts[:num_tokens] = history.ids, history.output_counts
        self._ids[slot].copy_(torch.from_numpy(ids))
        self._counts[slot].copy_(torch.from_numpy(counts))
        return slot

    def reserve(self, num_tokens: int) -> None:
        """Have room for so many in each slot."""
        room = self._ids.shape[1]
        if num_tokens > room:
            more = max(num_tokens - room, room)
            self._ids = torch.cat((self._ids, self._ids[:, :1].expand(-1, more)), dim=1)
            self._counts = torch.cat((self._counts, self._counts[:, :1].expand(-1, more)), dim=1)

    def penalise(self, logits: torch.Tensor, asked: Penalties, num_tokens: int) -> None:
        """Change the logits of the tokens seen so far, which are no more than ``num_tokens``."""
        ids, counts = self._first(asked.slots, num_tokens)
        places = ids + asked.rows[:, None] * logits.shape[1]
        seen = logits.take(places)
        changed = torch.where(seen > 0, seen / asked.repetition, seen * asked.repetition)
        changed -= asked.frequency * counts
        changed -= asked.presence * (counts > 0)
        logits.put_(places, changed)

    def append(
        self, asked: Penalties, num_tokens: int, at: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """One more output token of each: ``tokens`` [n, 1]. A new one gets the place ``at`` [n, 1],
        below ``num_tokens``, where nothing was put before.
        """
        ids, counts = self._first(asked.slots, num_tokens)
        is_it = ids == tokens
        counts += is_it
        is_known = is_it.any(dim=1, keepdim=True)
        ids.scatter_(1, at, torch.where(is_known, ids.gather(1, at), tokens.to(torch.int32)))
        counts.scatter_(1, at, counts.gather(1, at).masked_fill_(~is_known, 1.0))
        self._ids[:, :num_tokens].index_copy_(0, asked.slots, ids)
        self._counts[:, :num_tokens].index_copy_(0, asked.slots, counts)

    def _first(self, slots: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and counts [n, num_tokens] of what these slots have first."""
        assert num_tokens <= self._ids.shape[1], (num_tokens, self._ids.shape)
        ids, counts = self._ids[:, :num_tokens], self._counts[:, :num_tokens]
        return ids.index_select(0, slots), counts.index_select(0, slots)


def _with_rows(table: torch.Tensor, num_rows: int) -> torch.Tensor:
    """With so many rows, of which new ones are zero."""
    if num_rows <= len(table):
        return table
    return torch.cat((table, table.new_zeros(num_rows - len(table), table.shape[1])))


def together(ends: Sequence[int], most_elements: int) -> list[list[int]]:
    """Which histories of these lengths are looked at in one go: those of alike lengths.

    All in one go have the room of the longest, which is bounded for all of them together.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(ends)), key=lambda one: ends[one], reverse=True):
        if groups and (len(groups[-1]) + 1) * ends[groups[-1][0]] <= most_elements:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
