"""What attention over the paged KV cache is told: the step, and the model as kernels read it."""

from dataclasses import dataclass, field

import numpy as np
import torch

from kunserve.core.errors import ConfigError
from kunserve.engine.cpu.kernels.library import CBatch, CModel, address_of
from kunserve.engine.cpu.kernels.ops import Finish
from kunserve.model.spec import DTYPE_BYTES, ModelSpec

MAX_HEADS_PER_KV_HEAD = 36
TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


_INT32 = np.dtype(np.int32)


@dataclass(slots=True)
class StepBatch:
    """One microbatch as the kernels want it: C-contiguous int32 arrays, prepared once per step.

    Sequence ``s`` has tokens [q_starts[s], q_starts[s + 1]); they are the last ones of its
    context_lens[s] tokens. Block ``b`` of its KV is entry tables[rows[s], b]: layer l's K and V of
    it are unit entry + l.
    """

    token_ids: np.ndarray
    """[T]."""
    positions: np.ndarray
    """[T]; consecutive within a sequence."""
    tables: np.ndarray
    """[rows, max_blocks] block table entries; may be negative down to -num_layers."""
    rows: np.ndarray
    """[S] each sequence's row of ``tables``."""
    q_starts: np.ndarray
    """[S + 1]."""
    context_lens: np.ndarray
    """[S] tokens including this step's."""
    sample_rows: np.ndarray
    """[n] token indices whose logits are wanted, ascending."""
    local_tables: np.ndarray | None = None
    """As ``tables``, for layers with a window; None: the same."""
    reach: int | None = None
    """The longest context; None: to be looked for."""
    flat: np.ndarray | None = None
    """Positions, starts and context lengths one behind the other, where they lie so."""
    wants_sampled: bool = False
    """Whether of what the stage's last layer gives only ``sample_rows`` are wanted."""
    fed: torch.Tensor | None = None
    """[T] tokens on a device, which take the place of ``token_ids``."""
    _c: CBatch | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def num_positions(self) -> int:
        """Positions that the step's tokens reach."""
        return int(self.context_lens.max()) if self.reach is None else self.reach

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return len(self.positions)

    def check(self) -> None:
        """Assert that the arrays are what the kernels read."""
        arrays = [self.tables, self.rows]
        if self.flat is None:
            arrays += [self.positions, self.q_starts, self.context_lens]
            assert self.q_starts[0] == 0 and self.q_starts[-1] == self.num_tokens, self.q_starts
            sampled = self.sample_rows
            assert (sampled[1:] > sampled[:-1]).all(), sampled
        else:  # kernels read this one, by the others' lengths
            arrays.append(self.flat)
            assert self.flat.size == self.num_tokens + 2 * len(self.rows) + 1, self.flat.shape
            parts = self.positions, self.q_starts, self.context_lens
            assert all(part.base is self.flat for part in parts), "flat is not what they are of"
        if self.local_tables is not None:
            assert self.local_tables.shape == self.tables.shape, self.local_tables.shape
            arrays.append(self.local_tables)
        for array in arrays:
            assert array.dtype == _INT32 and array.flags.c_contiguous, (array.dtype, array.shape)
        assert len(self.q_starts) == len(self.rows) + 1 == len(self.context_lens) + 1

    def as_c(self, *rope_addresses: int) -> CBatch:
        """The kernels' view; valid while this batch and the rope tables live."""
        found = self._c
        if found is None:
            found = self._c = self._make_c()
        found.rope[: len(rope_addresses)] = rope_addresses
        found.kept = None
        return found

    def keep_sampled(self) -> int:
        """What ``as_c`` gave leaves out rows of a stage's last layer, if not all are wanted.

        Returns how many rows of hidden states are left: they come first.
        """
        rows, c_batch = self.sample_rows, self._c
        assert c_batch is not None
        if not self.wants_sampled or len(rows) >= self.num_tokens:
            return self.num_tokens
        assert rows.dtype == _INT32 and rows.flags.c_contiguous, rows.dtype
        c_batch.kept, c_batch.num_kept = address_of(rows), len(rows)
        return len(rows)

    def _make_c(self) -> CBatch:
        num_tokens = self.num_tokens
        if self.flat is None:
            arrays = self.positions, self.q_starts, self.context_lens
            positions, q_starts, context_lens = map(address_of, arrays)
        else:
            positions = address_of(self.flat)
            q_starts = positions + num_tokens * _INT32.itemsize
            context_lens = q_starts + (num_tokens + 1) * _INT32.itemsize
        return CBatch(
            positions=positions,
            tables=address_of(self.tables),
            rows=address_of(self.rows),
            q_starts=q_starts,
            context_lens=context_lens,
            num_tokens=num_tokens,
            num_seqs=len(self.rows),
            max_blocks=self.tables.shape[1],
            local_tables=None if self.local_tables is None else address_of(self.local_tables),
        )


def c_model(spec: ModelSpec, kv_base_address: int, block_size: int) -> CModel:
    """The kernels' view of the model, after checking that they can run it."""
    if spec.dtype == "float16":
        raise ConfigError(
            "--dtype float16 needs --device cuda: CPUs compute in bfloat16 or float32"
        )
    experts = spec.experts
    for name, size in (
        ("hidden_size", spec.hidden_size),
        ("intermediate", spec.intermediate_size),
        ("shared expert", 0 if experts is None else experts.shared_size or 0),
    ):
        if size * DTYPE_BYTES[spec.dtype] % 16:
            raise ConfigError(f"{name} {size} of {spec.name} does not fill whole 16 bytes")
    if spec.head_dim % 32:
        raise ConfigError(f"head_dim {spec.head_dim} of {spec.name} is not a multiple of 32")
    if not 0 < spec.num_heads // spec.num_kv_heads <= MAX_HEADS_PER_KV_HEAD:
        raise ConfigError(f"{spec.num_heads} heads over {spec.num_kv_heads} KV heads: too many")
    return CModel(
        unit_bytes=spec.unit_bytes(block_size),
        hidden=spec.hidden_size,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate=spec.intermediate_size,
        block_size=block_size,
        window=0 if spec.global_layers else spec.sliding_window or 0,
        eps=spec.rms_eps,
        score_cap=spec.score_cap or 0.0,
        norm_offset=int(spec.has_offset_norms),
        gate=Finish.GEGLU if spec.has_gelu else Finish.SWIGLU,
        kv=kv_base_address,
        experts=0 if experts is None else experts.number,
        experts_per_token=0 if experts is None else experts.per_token,
        normalises_experts=experts is not None and experts.normalised,
        held_experts=0 if experts is None else experts.held,
        shared=0 if experts is None else experts.shared_size or 0,
        whole_qk_norm=spec.qk_norm and spec.has_whole_qk_norm,
    )


def capped(values: torch.Tensor, cap: float | None) -> torch.Tensor:
    """The values, bent in place so that none gets beyond the cap; untouched where there is none."""
    return values if cap is None else values.div_(cap).tanh_().mul_(cap)
