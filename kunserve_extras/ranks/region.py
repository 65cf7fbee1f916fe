"""Memory that all ranks of an instance map: orders, and on CPUs what they compute together.

Orders of steps are arrays and no messages: every rank computes from them where they lie.
"""

import enum
import mmap
import os
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kunserve.core.layout import LayerRange
from kunserve.engine.attention import TORCH_DTYPES, StepBatch
from kunserve.model.spec import ModelSpec

_ALIGNMENT_BYTES = 128
_HEADER_FIELDS = 16
_Cuts: TypeAlias = dict[str, tuple[int, int]]
"""Offset and bytes of each array by its name."""
_NO_ROWS = np.empty(0, dtype=np.int32)


class Room(NamedTuple):
    """The largest step and the most logits that fit."""

    num_tokens: int
    num_entries: int
    """Of block tables."""
    num_rows: int
    """Of logits."""

    def holds(self, other: "Room") -> bool:
        """Whether the other fits in this one."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))

    def grown_to(self, other: "Room") -> "Room":
        """Room for both, and some more, because steps that outgrow it tend to do so again."""
        grown = (mine if mine >= theirs else 2 * theirs for mine, theirs in zip(self, other))  # noqa: B905
        return Room(*grown)


class Command(enum.IntEnum):
    """What rank 0 has all ranks do."""

    STAGE = 1
    """Compute layers over a step."""
    LOGITS = 2
    """Compute logits of rows."""


@dataclass(frozen=True, slots=True)
class StageOrder:
    """One step, as every rank reads it."""

    batch: StepBatch
    layers: LayerRange
    embeds: bool
    """Whether the step begins with token ids."""


class Orders:
    """One memory file, cut into arrays. Rank 0 makes it; the others open it by its descriptor."""

    def __init__(self, spec: ModelSpec, num_ranks: int, room: Room, fd: int | None = None) -> None:
        """``spec`` is the whole model's."""
        self.room = room
        self._cuts, end = self._cut(spec, num_ranks, room)
        self.num_bytes = end
        if fd is None:
            fd = os.memfd_create("kunserve-ranks")
            os.ftruncate(fd, end)
            # Now, so that a shortage shows at start.
            os.posix_fallocate(fd, 0, end)
        self.fd = fd
        self._memory = mmap.mmap(fd, end)
        self._header = self._array("header", np.int64)

    @classmethod
    def bytes_of(cls, spec: ModelSpec, num_ranks: int, room: Room) -> int:
        """Of a file for such steps."""
        return cls._cut(spec, num_ranks, room)[1]

    def close_file(self) -> None:
        """All have opened it: the memory goes with the last tensor over it."""
        os.close(self.fd)

    # Rank 0 writes orders, the others read them

    def write_stage(self, batch: StepBatch, layers: LayerRange, *, embeds: bool) -> None:
        """The next command is to compute this."""
        for name in ("positions", "q_starts", "context_lens", "rows"):
            values = getattr(batch, name)
            self._array(name, np.int32)[: len(values)] = values
        if embeds:
            self._array("token_ids", np.int32)[: batch.num_tokens] = batch.token_ids
        self._array("tables", np.int32)[: batch.tables.size] = batch.tables.reshape(-1)
        shape = (batch.num_tokens, len(batch.rows), *batch.tables.shape)
        self._say(Command.STAGE, *shape, *layers, embeds)

    def write_logits(self, which: npt.NDArray[np.integer[Any]]) -> None:
        """The next command is to compute logits of these rows of the last stage."""
        self._array("wanted", np.int32)[: len(which)] = which
        self._say(Command.LOGITS, len(which))

    def _say(self, *values: int) -> None:
        self._header[: len(values)] = values

    @property
    def command(self) -> Command:
        """The command that was written last."""
        return Command(int(self._header[0]))

    def read_logits(self) -> npt.NDArray[np.int32]:
        """Which rows; they lie where rank 0 has written them."""
        return self._array("wanted", np.int32)[: int(self._header[1])]

    def read_stage(self) -> StageOrder:
        """What to compute; arrays lie where rank 0 has written them."""
        num_tokens, num_seqs, num_tables, width, first, end, embeds = self._header[1:8].tolist()

        def of(name: str, length: int) -> npt.NDArray[np.int32]:
            return self._array(name, np.int32)[:length]

        batch = StepBatch(
            token_ids=of("token_ids", num_tokens if embeds else 0),
            positions=of("positions", num_tokens),
            tables=of("tables", num_tables * width).reshape(num_tables, width),
            rows=of("rows", num_seqs),
            q_starts=of("q_starts", num_seqs + 1),
            context_lens=of("context_lens", num_seqs),
            sample_rows=_NO_ROWS,
        )
        return StageOrder(batch, LayerRange(first, end), bool(embeds))

    def _array(self, name: str, dtype: Any) -> npt.NDArray[Any]:
        offset, num_bytes = self._cuts[name]
        count = num_bytes // np.dtype(dtype).itemsize
        return np.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)

    @classmethod
    def _cut(cls, spec: ModelSpec, num_ranks: int, room: Room) -> tuple[_Cuts, int]:
        """The arrays of ``_sizes`` one after the other, and the end of the last one."""
        cuts: _Cuts = {}
        end = 0
        for name, num_bytes in cls._sizes(spec, num_ranks, room).items():
            cuts[name] = (end, num_bytes)
            end += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return cuts, end

    @staticmethod
    def _sizes(spec: ModelSpec, num_ranks: int, room: Room) -> dict[str, int]:
        """Bytes of each array."""
        tokens = room.num_tokens
        return {
            "header": 8 * _HEADER_FIELDS,
            "token_ids": 4 * tokens,
            "positions": 4 * tokens,
            "q_starts": 4 * (tokens + 1),
            "context_lens": 4 * tokens,
            "rows": 4 * tokens,
            "tables": 4 * room.num_entries,
            "wanted": 4 * room.num_rows,
        }


class Region(Orders):
    """The same, with all that ranks on CPUs compute together."""

    def __init__(self, spec: ModelSpec, num_ranks: int, room: Room, fd: int | None = None) -> None:
        """See ``Orders``."""
        super().__init__(spec, num_ranks, room, fd)
        dtype, tokens, hidden = TORCH_DTYPES[spec.dtype], room.num_tokens, spec.hidden_size
        self.hidden = self._tensor("hidden", dtype).view(tokens, hidden)
        """[tokens, hidden] the residual stream."""
        self.sampled = self._tensor("sampled", dtype).view(room.num_rows, hidden)
        """[rows, hidden] normalised rows whose logits are wanted."""
        self._logits = self._tensor("logits", torch.float32)
        self._vocab_size = spec.vocab_size
        self.normed_at = self._tensor("normed", torch.uint8).data_ptr()
        self.parts_at = self._tensor("parts", torch.uint8).data_ptr()

    def logits(self, num_rows: int) -> torch.Tensor:
        """Float32 [rows, vocab]."""
        return self._logits[: num_rows * self._vocab_size].view(num_rows, self._vocab_size)

    def _tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        offset, num_bytes = self._cuts[name]
        count = num_bytes // dtype.itemsize
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)

    @staticmethod
    def _sizes(spec: ModelSpec, num_ranks: int, room: Room) -> dict[str, int]:
        tokens, row_bytes = room.num_tokens, spec.hidden_size * spec.dtype_bytes
        return {
            **Orders._sizes(spec, num_ranks, room),
            "hidden": tokens * row_bytes,
            "normed": tokens * row_bytes,
            "parts": num_ranks * tokens * spec.hidden_size * 4,
            "sampled": room.num_rows * row_bytes,
            "logits": room.num_rows * spec.vocab_size * 4,
        }
