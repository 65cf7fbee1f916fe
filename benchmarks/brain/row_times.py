"""What simulated steps take in which a decode has rows for its guesses."""

from collections.abc import Sequence

from kunserve.core.step import Chunk
from kunserve_lab.sim.devices import Device
from kunserve_lab.sim.models import SimModel
from kunserve_lab.sim.profile import RooflineTimes


class RowTimes(RooflineTimes):
    """Steps in which a decode has rows for its guesses. They read its KV once, or once for each."""

    def __init__(self, model: SimModel, device: Device, num_gpus: int, *, reads_once: bool) -> None:
        super().__init__(model, device, num_gpus)
        self._reads_once = reads_once

    def stage_s(self, chunks: Sequence[Chunk], num_layers: int, is_last: bool) -> float:
        """A decode of its last position, and rows that only weights see."""
        plain = []
        num_rows = context = 0
        for request_id, start, count, samples in chunks:
            if samples > 1:
                num_rows += count - 1
                context += (count - 1) * (start + count)
                plain.append(Chunk(request_id, start + count - 1, 1, samples))
            else:
                plain.append(Chunk(request_id, start, count, samples))
        seconds = super().stage_s(plain, num_layers, is_last)
        if not num_rows:
            return seconds
        num_tokens = sum(chunk.num_tokens for chunk in plain)
        return seconds + num_layers * self._rows_s(num_tokens, num_rows, context)

    def _rows_s(self, num_tokens: int, num_rows: int, context: float) -> float:
        """In a layer; ``context``: of all these rows together."""
        model = self._model
        seconds = self.matmul_s(num_tokens + num_rows) - self.matmul_s(num_tokens)
        seconds += model.activation_width * model.dtype_bytes * num_rows / self._weight_rate
        if not self._reads_once:
            seconds += context * model.kv_token_bytes / self._kv_rate
        if self._num_gpus > 1:
            seconds += 2.0 * (self._reduce_s(num_tokens + num_rows) - self._reduce_s(num_tokens))
        return seconds

    def more_s(self, num_tokens: int, num_sampled: int, num_rows: int, context: float) -> float:
        """What so many rows add to a step of a whole model."""
        head_s = self._head_s(num_sampled + num_rows) - self._head_s(num_sampled)
        return self._model.num_layers * self._rows_s(num_tokens, num_rows, context) + head_s
