"""What recorded steps read: a batch and its rows at addresses that never change."""

import math

import numpy as np
import torch

from kunserve.engine.attention import TORCH_DTYPES, StepBatch
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.ops.table import DeviceBatch, Lengths, aligned
from kunserve_extras.torch_body.pinned import PinnedTurns


class GraphInputs:
    """Fixed buffers for steps of recorded sizes, filled by one copy to the device.

    Rows beyond a step's own ones write and read the units below unit 0, which nobody else uses:
    ``InstanceMemory`` backs them for this.
    """

    def __init__(
        self,
        spec: ModelSpec,
        block_size: int,
        most_rows: int,
        num_positions: int,
        device: torch.device,
        most_mixed_seqs: int | None = None,
    ) -> None:
        """Each row is a sequence of one token, or with ``most_mixed_seqs`` a token of any of so
        many sequences.
        """
        self._nowhere = -spec.num_layers
        self._block_size = block_size
        self._width = max(1, math.ceil(num_positions / block_size))
        self.most_mixed_seqs = most_mixed_seqs
        num_elements = sum(size for _, size in self._places(most_rows).values())
        self._flat = torch.zeros(num_elements, dtype=torch.int32, device=device)
        self._staged = PinnedTurns(num_elements, torch.int32, device)
        dtype = TORCH_DTYPES[spec.dtype]
        self.hidden = torch.zeros(most_rows, spec.hidden_size, dtype=dtype, device=device)
        """[most_rows, hidden], which the layers change."""
        shape = (spec.num_ropes, most_rows, 2, spec.head_dim // 2)
        self.angles = torch.zeros(shape, device=device)
        """[tables, most_rows, 2, head_dim / 2]."""
        self._batches: dict[int, DeviceBatch] = {}

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return self._flat.nbytes + self.hidden.nbytes + self.angles.nbytes

    def holds(self, batch: StepBatch) -> bool:
        """Whether its sequences are of the recorded kind, and no context is too long."""
        num_seqs, most = len(batch.rows), self.most_mixed_seqs
        if most is None:
            lengths = batch.q_starts[1:] - batch.q_starts[:-1]
            is_kind = batch.num_tokens == num_seqs and not (lengths != 1).any()
        else:
            is_kind = num_seqs <= most
        return is_kind and bool(batch.context_lens.max() <= self._width * self._block_size)

    def num_seqs(self, rows: int) -> int:
        """So many sequences, some of them empty, has a step of so many rows."""
        return rows if self.most_mixed_seqs is None else min(rows, self.most_mixed_seqs)

    def batch(self, rows: int) -> DeviceBatch:
        """The batch of so many rows, as kernels read it. Its content is what was filled last."""
        if rows not in self._batches:
            num_seqs = self.num_seqs(rows)
            parts = {
                name: self._flat[first : first + size]
                for name, (first, size) in self._places(rows).items()
            }
            is_mixed = self.most_mixed_seqs is not None
            self._batches[rows] = DeviceBatch(
                host=None,
                token_ids=parts["token_ids"][:rows],
                positions=parts["positions"][:rows],
                entries=parts["entries"][:rows],
                offsets=parts["offsets"][:rows],
                tables=parts["tables"][: num_seqs * self._width].view(num_seqs, self._width),
                q_starts=parts["q_starts"][: num_seqs + 1],
                context_lens=parts["context_lens"][:num_seqs],
                sample_rows=self._flat[:0],
                lengths=Lengths(True, is_mixed, self._width * self._block_size),
                is_mixed=is_mixed,
            )
        return self._batches[rows]

    def fill(self, rows: int, batch: StepBatch | None) -> DeviceBatch:
        """Put a batch that is held into the buffers, padded to so many rows; None pads all.

        Rows of single tokens that are padding have a context of their own, others have none.
        """
        staged, places, num_seqs = self._staged.next(), self._places(rows), self.num_seqs(rows)
        parts = {name: staged[first : first + size] for name, (first, size) in places.items()}
        tables = parts["tables"][: num_seqs * self._width].reshape(num_seqs, self._width)
        tables.fill(self._nowhere)
        for name, padding in (
            ("token_ids", 0),
            ("positions", 0),
            ("offsets", 0),
            ("context_lens", 1),
        ):
            parts[name].fill(padding)
        parts["entries"].fill(self._nowhere)
        starts = parts["q_starts"][: num_seqs + 1]
        is_single = self.most_mixed_seqs is None
        starts[:] = np.arange(num_seqs + 1) if is_single else 0
        if batch is not None:
            num, seqs, block = (
                batch.num_tokens,
                len(batch.rows),
                batch.positions // self._block_size,
            )
            used = int(block.max()) + 1
            tables[:seqs, :used] = batch.tables[batch.rows, :used]
            of = np.repeat(np.arange(seqs), np.diff(batch.q_starts))
            parts["token_ids"][: len(batch.token_ids)] = batch.token_ids
            parts["positions"][:num] = batch.positions
            parts["entries"][:num] = tables[of, block]
            parts["offsets"][:num] = batch.positions % self._block_size
            parts["context_lens"][:seqs] = batch.context_lens
            if not is_single:
                starts[: seqs + 1], starts[seqs + 1 :] = batch.q_starts, num
        num_elements = sum(size for _, size in places.values())
        self._staged.send(self._flat[:num_elements])
        return self.batch(rows)

    def _places(self, rows: int) -> dict[str, tuple[int, int]]:
        """(first, number of) elements of each part for so many rows."""
        num_seqs = self.num_seqs(rows)
        sizes = dict.fromkeys(("token_ids", "positions", "entries", "offsets"), rows)
        sizes |= {"context_lens": num_seqs, "q_starts": num_seqs + 1}
        sizes["tables"] = num_seqs * self._width
        places, first = {}, 0
        for name, size in sizes.items():
            places[name] = (first, aligned(size))
            first += aligned(size)
        return places
