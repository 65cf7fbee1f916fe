"""What steps read and write that are recorded whole, from tokens to the largest logits."""

from collections.abc import Sequence

import torch

from kunserve.engine.cpu.decoder import Found
from kunserve_extras.torch_body.graph_inputs import GraphInputs
from kunserve_extras.torch_body.ops.table import DeviceBatch


class WholeSteps:
    """The tensors whose addresses graphs of whole steps know, kept alive for them."""

    def __init__(
        self,
        tables: Sequence[torch.Tensor],
        logits: torch.Tensor,
        raw_logits: torch.Tensor,
        most_rows: int,
        inputs: GraphInputs,
    ) -> None:
        """``tables`` of angles, for all positions; ``raw_logits`` are those not widened yet."""
        self.tables = tuple(tables)
        self.logits = logits
        self._kept = raw_logits
        self._inputs = inputs
        self._largest = logits.new_zeros(most_rows)
        self._places = logits.new_zeros(most_rows, dtype=torch.int64)

    def begin(self, rows: int) -> tuple[DeviceBatch, torch.Tensor, list[torch.Tensor]]:
        """The batch as it was filled last, rows of the residual stream, and the batch's angles."""
        batch, angles = self._inputs.batch(rows), [one[:rows] for one in self._inputs.angles]
        for table, out in zip(self.tables, angles, strict=True):
            torch.index_select(table, 0, batch.positions, out=out)
        return batch, self._inputs.hidden[:rows], angles

    def found(self, rows: int) -> Found:
        """Of each row the largest logit and its first place."""
        return self._largest[:rows], self._places[:rows]
