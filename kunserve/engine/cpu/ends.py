"""A CPU decoder's embedding and output head, where they are computed in one call with its layers.

After a step's kernels all of this process's other code is cold, because caches hold weights. So a
call and the few operations of torch between two of them cost as much as a whole layer.
"""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kunserve.core.layout import VocabRange
from kunserve.engine.cpu.hidden_rows import HiddenRows
from kunserve.engine.cpu.kernels.library import SUFFIX, CEnds, address_of, kernel
from kunserve.engine.cpu.kernels.ops import MOST_EXACT, Matrix
from kunserve.engine.cpu.kernels.packed import PackedMatrix
from kunserve.engine.cpu.kernels.panels import PanelMatrix
from kunserve.model.packed import PANEL_ROWS
from kunserve.model.spec import ModelSpec


class Largest(NamedTuple):
    """Of each row of logits, as ``kernels.ops.largest`` gives them."""

    values: list[float]
    token_ids: list[int]


def can_be_fused(spec: ModelSpec, matrix: Matrix) -> bool:
    """Whether nothing is done between embedding, layers and head but what the kernels do.

    And whether a matrix that they take is not quantised.
    """
    is_plain = spec.embedding_scale == 1.0 and spec.logit_scale == 1.0 and spec.logit_cap is None
    is_matrix = isinstance(matrix, torch.Tensor | PanelMatrix) and matrix.dtype in SUFFIX
    return is_plain and is_matrix and spec.vocab_size < MOST_EXACT


def _memory_of(matrix: torch.Tensor | PanelMatrix) -> tuple[torch.Tensor, int]:
    """Where it lies, and the panels with which it begins."""
    found = (matrix.data, matrix.num_panels) if isinstance(matrix, PanelMatrix) else (matrix, 0)
    assert found[0].is_contiguous()
    return found


class HeadCall:
    """The largest logits of a part of an output head that is not quantised, in one call."""

    def __init__(
        self, spec: ModelSpec, norm: torch.Tensor, head: torch.Tensor | PanelMatrix
    ) -> None:
        memory, self._num_panels = _memory_of(head)
        assert norm.is_contiguous()
        self._row_bytes = head.shape[1] * memory.element_size()
        self._head_at = memory.data_ptr()
        self._normed_width = self._row_bytes // 4
        self._call = kernel("kun_head", head.dtype)
        self._ends = CEnds(
            row_bytes=self._row_bytes,
            norm=norm.data_ptr(),
            width=spec.hidden_size,
            eps=spec.rms_eps,
            norm_offset=int(spec.has_offset_norms),
        )

    def largest(
        self, rows: HiddenRows, vocab: VocabRange, room: Callable[[int, int], torch.Tensor]
    ) -> npt.NDArray[np.float32]:
        """As ``kernels.ops.largest_pairs``, of ``rows``; ``room`` gives float32 [rows, width]."""
        num_rows = rows.num_rows
        assert rows.data.nbytes == num_rows * self._row_bytes, (rows.data.nbytes, num_rows)
        memory = room(num_rows, vocab.num_rows + self._normed_width)
        logits_at = memory.data_ptr()
        pairs = np.empty((num_rows, 2), dtype=np.float32)
        ends = self._ends
        ends.num_sampled, ends.vocab, ends.first = num_rows, vocab.num_rows, vocab.first
        assert vocab.first % PANEL_ROWS == 0, vocab
        ends.head = self._head_at + vocab.first * self._row_bytes
        ends.head_panels = max(0, self._num_panels - vocab.first // PANEL_ROWS)
        ends.logits, ends.normed = logits_at, logits_at + num_rows * vocab.num_rows * 4
        ends.pairs = address_of(pairs)
        self._call(rows.address, ends)
        return pairs


class Ends:
    """What ``kun_whole`` wants beside the layers, kept from step to step."""

    def __init__(
        self,
        spec: ModelSpec,
        embedding: torch.Tensor | PanelMatrix,
        norm: torch.Tensor,
        head: Matrix,
    ) -> None:
        self._dtype = embedding.dtype
        self._pairs = (ctypes.c_float * 0)()
        memory, num_panels = _memory_of(embedding)
        assert norm.is_contiguous()
        self._ends = CEnds(
            embedding=memory.data_ptr(),
            embedding_rows=embedding.shape[0],
            embedding_panels=num_panels,
            row_bytes=embedding.shape[1] * memory.element_size(),
            norm=norm.data_ptr(),
            vocab=spec.vocab_size,
            width=spec.hidden_size,
            eps=spec.rms_eps,
            norm_offset=int(spec.has_offset_norms),
        )
        if isinstance(head, PackedMatrix):
            self._packed = head.as_c()
            self._ends.packed = ctypes.pointer(self._packed)
        else:
            memory, self._ends.head_panels = _memory_of(head)
            assert head.dtype == self._dtype
            self._ends.head = memory.data_ptr()

    def reserve(self, num_sampled: int) -> None:
        """Take memory for what is found of so many rows, which is 8 bytes each."""
        self._pairs = (ctypes.c_float * (2 * num_sampled))()
        self._ends.pairs = ctypes.addressof(self._pairs)

    def of_step(
        self,
        token_ids: npt.NDArray[np.int32],
        sampled: npt.NDArray[np.int32],
        normed: int,
        rounded: int,
        logits: int,
    ) -> CEnds:
        """The ends of a step that samples after these of its tokens; the rest are addresses."""
        ends, num_sampled = self._ends, len(sampled)
        assert token_ids.dtype == sampled.dtype == np.dtype(np.int32)
        assert token_ids.flags.c_contiguous and sampled.flags.c_contiguous
        if 2 * num_sampled > len(self._pairs):
            self.reserve(num_sampled)
        ends.token_ids = address_of(token_ids)
        ends.sampled = None if num_sampled == len(token_ids) else address_of(sampled)
        ends.num_sampled = num_sampled
        ends.normed, ends.rounded, ends.logits = normed, rounded, logits
        return ends

    def of_first_stage(self, token_ids: npt.NDArray[np.int32]) -> CEnds:
        """The embedding alone: nothing is sampled after the layers."""
        assert token_ids.dtype == np.dtype(np.int32) and token_ids.flags.c_contiguous
        self._ends.token_ids = address_of(token_ids)
        self._ends.num_sampled = 0
        return self._ends

    def largest(self) -> Largest:
        """What the last step has found."""
        pairs = self._pairs[: 2 * self._ends.num_sampled]
        return Largest(pairs[::2], list(map(int, pairs[1::2])))
