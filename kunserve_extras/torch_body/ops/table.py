"""The operations that differ between devices, and a step's batch as they read it."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from kunserve.engine.attention import StepBatch
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.ops.expert_room import ExpertRoom
from kunserve_extras.torch_body.pinned import Sender
from kunserve_extras.torch_body.quantised import QuantisedMatrix

_LEAST_PARTS, _MOST_PARTS = 16, 64
_PROGRAMS = 256
"""So many parts, over all KV heads, keep a large device busy with one long sequence."""
_ALIGNMENT_ELEMENTS = 16
"""Parts of a batch begin at multiples of this, because Triton compiles a kernel anew for each
combination of aligned and other addresses."""


def aligned(num_elements: int) -> int:
    """Elements from the start of a part of a batch to the start of the next one."""
    return -(-num_elements // _ALIGNMENT_ELEMENTS) * _ALIGNMENT_ELEMENTS


class Lengths(NamedTuple):
    """What decides which kernels a step's attention launches. Asked in every layer, so it is found
    out once; of a recorded step it is what may come.
    """

    has_single: bool
    """Sequences of one token."""
    has_several: bool
    """Sequences of several."""
    longest: int
    """Tokens of the longest context."""


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One microbatch on the device: int32 tensors, copied there in one go."""

    host: StepBatch | None
    """The same for the host. None in a recorded step: what is computed must follow from shapes and
    from what lies on the device. Its rows are sequences of one token each, unless ``is_mixed``."""
    token_ids: torch.Tensor
    """[T], or empty where this is not the first stage."""
    positions: torch.Tensor
    """[T]."""
    entries: torch.Tensor
    """[T] the block table entry of each token's own block; may be negative."""
    offsets: torch.Tensor
    """[T] each token's place in its block."""
    tables: torch.Tensor
    """[S, max_blocks] entries of each sequence."""
    q_starts: torch.Tensor
    """[S + 1]."""
    context_lens: torch.Tensor
    """[S]."""
    sample_rows: torch.Tensor
    """[n]."""
    lengths: Lengths
    is_mixed: bool = False
    """Recorded for sequences of any number of tokens, also none. Rows behind them are padding."""

    @classmethod
    def of(
        cls,
        batch: StepBatch,
        block_size: int,
        device: torch.device,
        sender: Sender | None = None,
    ) -> "DeviceBatch":
        """The batch, with what follows from it. With a ``sender`` for the device nothing is waited
        for: the step before may still run.
        """
        batch.check()
        tables = batch.tables[batch.rows]
        lengths = np.diff(batch.q_starts)
        sequences = np.repeat(np.arange(len(lengths)), lengths)
        arrays = {
            "token_ids": batch.token_ids,
            "positions": batch.positions,
            "entries": tables[sequences, batch.positions // block_size],
            "offsets": batch.positions % block_size,
            "tables": tables,
            "q_starts": batch.q_starts,
            "context_lens": batch.context_lens,
            "sample_rows": batch.sample_rows,
        }
        ends = np.cumsum([aligned(array.size) for array in arrays.values()]).tolist()
        places = dict(zip(arrays, [0, *ends[:-1]], strict=True))
        flat = np.zeros(ends[-1], dtype=np.int32)
        for name, array in arrays.items():
            flat[places[name] : places[name] + array.size] = array.reshape(-1)
        if sender is None:
            whole = torch.from_numpy(flat).to(device)
        else:  # in pairs
            whole = sender.send({"flat": flat.view(np.int64)})["flat"].view(torch.int32)
        parts = {
            name: whole[places[name] : places[name] + array.size].view(array.shape)
            for name, array in arrays.items()
        }
        longest = int(batch.context_lens.max(initial=0))
        found = Lengths(bool((lengths == 1).any()), bool((lengths > 1).any()), longest)
        return cls(host=batch, lengths=found, **parts)


def most_parts(spec: ModelSpec) -> int:
    """Of the keys of a sequence of one token, a power of two; each part has sums of its own.

    By the model alone: how a sequence is parted, and so its bits, must not follow from the batch.
    """
    wanted = max(_LEAST_PARTS, min(_MOST_PARTS, _PROGRAMS // spec.num_kv_heads))
    return 1 << wanted.bit_length() - 1


def sums_bytes(spec: ModelSpec, num_sequences: int) -> int:
    """What attention of so many sequences of one token takes beside its output."""
    width = (1 << (spec.head_dim - 1).bit_length()) + 2
    return num_sequences * spec.num_heads * most_parts(spec) * width * 4


Heads: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values [T, heads, head_dim] of a step: views of the same rows."""
HeadNorms: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Weights [head_dim] by which each head of queries, and of keys, is normalised by itself."""


class Ops(Protocol):
    """Every operation writes into a tensor that is there already."""

    product_sizes: tuple[int, ...]
    """From each of so many tokens on, ``product`` may need to be compiled anew."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """Normalise the rows of ``x`` as the model does; ``out`` may be ``x``."""
        ...

    def gate_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """The model's activation of gate, times up, of rows [gate | up]."""
        ...

    def product(
        self,
        x: torch.Tensor,
        weight: QuantisedMatrix,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        adds: bool,
    ) -> None:
        """``x`` [T, columns] times ``weight`` transposed, and the bias, into ``out`` [T, rows].

        With ``adds`` in addition to what is there. Sums are in float32, and rounded once.
        """
        ...

    def place(
        self,
        layer: int,
        heads: Heads,
        norms: HeadNorms | None,
        angles: torch.Tensor,
        kv: torch.Tensor,
        batch: DeviceBatch,
    ) -> None:
        """Turn a step's heads by ``angles`` [T, 2, head_dim / 2], which are cos and sin: queries in
        place, and keys into each token's unit, with its values. Normalised first, where ``norms``
        are given.

        ``kv`` [units, 2, kv_heads, block_size, head_dim] begins ``num_layers`` units below unit 0.
        What becomes of the keys in ``heads`` is not said.
        """
        ...

    def attend(
        self, layer: int, q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, out: torch.Tensor
    ) -> None:
        """Attention of ``q`` [T, heads, head_dim] over what the units hold, into ``out``."""
        ...

    def route(
        self, x: torch.Tensor, router: torch.Tensor, first_expert: int, room: ExpertRoom
    ) -> None:
        """Choose the experts of the rows of ``x``, of equal ones the first, and order the pairs of
        those that are held: from ``first_expert`` on. ``pairs`` and ``starts`` are for
        ``run_experts`` of the same table only.
        """
        ...

    def run_experts(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        first_expert: int,
        room: ExpertRoom,
    ) -> None:
        """Into ``room.products`` what each held expert makes of the rows of ``x`` that chose it.

        ``gate_up`` [held * 2 inner, hidden] and ``down`` [held * hidden, inner] are those of all.
        """
        ...

    def sum_experts(
        self,
        first_expert: int,
        room: ExpertRoom,
        shared: torch.Tensor | None,
        hidden: torch.Tensor | None,
    ) -> None:
        """Add up the products of held experts by their shares, in the order of their numbers and in
        float32, then ``shared`` [T, hidden] by the sigmoid of its logit. Added to ``hidden`` [T,
        hidden], rounded first; where that is None it is left in ``room.sums``.
        """
        ...
