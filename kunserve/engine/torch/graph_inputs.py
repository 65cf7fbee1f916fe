"""What recorded steps read: a batch and its rows at addresses that never change."""

import math

import numpy as np
import torch

from kunserve.engine.attention import TORCH_DTYPES, StepBatch
from kunserve.engine.torch.ops.table import DeviceBatch, aligned
from kunserve.engine.torch.pinned import PinnedTurns
from kunserve.model.spec import ModelSpec


class GraphInputs:
    """Fixed buffers for steps of one token per sequence, filled by one copy to the device.

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
    ) -> None:
        self._nowhere = -spec.num_layers
        self._block_size = block_size
        self._width = max(1, math.ceil(num_positions / block_size))
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
        """Whether each sequence of a batch has one token, and a context that is not too long."""
        num = batch.num_tokens
        if num != len(batch.rows) or (batch.q_starts[1:] - batch.q_starts[:-1] != 1).any():
            return False
        return bool(batch.context_lens.max() <= self._width * self._block_size)

    def batch(self, rows: int) -> DeviceBatch:
        """The batch of so many rows, as kernels read it. Its content is what was filled last."""
        if rows not in self._batches:
            parts = {
                name: self._flat[first : first + size]
                for name, (first, size) in self._places(rows).items()
            }
            self._batches[rows] = DeviceBatch(
                host=None,
                token_ids=self._flat[:0],
                positions=parts["positions"][:rows],
                entries=parts["entries"][:rows],
                offsets=parts["offsets"][:rows],
                tables=parts["tables"][: rows * self._width].view(rows, self._width),
                q_starts=parts["q_starts"][: rows + 1],
                context_lens=parts["context_lens"][:rows],
                sample_rows=self._flat[:0],
            )
        return self._batches[rows]

    def fill(self, rows: int, batch: StepBatch | None) -> DeviceBatch:
        """Put a batch that is held into the buffers, padded to so many rows; None pads all."""
        staged, places = self._staged.next(), self._places(rows)
        parts = {name: staged[first : first + size] for name, (first, size) in places.items()}
        tables = parts["tables"][: rows * self._width].reshape(rows, self._width)
        tables.fill(self._nowhere)
        for name, padding in (("positions", 0), ("offsets", 0), ("context_lens", 1)):
            parts[name].fill(padding)
        parts["entries"].fill(self._nowhere)
        parts["q_starts"][: rows + 1] = np.arange(rows + 1)
        if batch is not None:
            num, block = batch.num_tokens, batch.positions // self._block_size
            used = int(block.max()) + 1
            tables[:num, :used] = batch.tables[batch.rows, :used]
            parts["positions"][:num] = batch.positions
            parts["entries"][:num] = tables[np.arange(num), block]
            parts["offsets"][:num] = batch.positions % self._block_size
            parts["context_lens"][:num] = batch.context_lens
        num_elements = sum(size for _, size in places.values())
        self._staged.send(self._flat[:num_elements])
        return self.batch(rows)

    def _places(self, rows: int) -> dict[str, tuple[int, int]]:
        """(first, number of) elements of each part for so many rows."""
        sizes = dict.fromkeys(("positions", "entries", "offsets", "context_lens"), rows)
        sizes |= {"q_starts": rows + 1, "tables": rows * self._width}
        places, first = {}, 0
        for name, size in sizes.items():
            places[name] = (first, aligned(size))
            first += aligned(size)
        return places
