"""The sparse MLP by our own Triton kernels: which tiles they are launched with."""

from dataclasses import dataclass

import torch
import triton

from kunserve.model.experts import Experts
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.ops.expert_room import ExpertRoom
from kunserve_extras.triton_ops.experts import (
    choose_kernel,
    down_kernel,
    gate_kernel,
    order_kernel,
    router_kernel,
    sum_kernel,
)

LEAST_MANY = 32
"""With so many rows for each expert, on average, tiles for many are used."""
CHOOSE_PIECE_ELEMENTS = 1 << 14
"""Comparisons of logits that a program holds at once."""
ORDER_PIECE = 2048
SUM_PIECE = 1024


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """How much one program of a product holds at a time, and with how many threads."""

    outs: int
    """Rows of weights."""
    rows: int
    """Tokens."""
    piece: int
    """Columns that are multiplied at once. Bits depend on it, and on nothing else here."""
    num_warps: int
    num_stages: int

    @property
    def constants(self) -> dict[str, int]:
        """As kernels are given it."""
        return {"OUTS": self.outs, "ROWS": self.rows, "PIECE": self.piece}

    @property
    def options(self) -> dict[str, int]:
        """As Triton is given it."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Of the products of one step."""

    gate: ExpertTile
    down: ExpertTile

    def __post_init__(self) -> None:
        assert self.gate.rows == self.down.rows


def router_tile(dtype: str) -> ExpertTile:
    """Few outputs each, because there are few tokens mostly, and programs are to be many."""
    if dtype == "float32":
        return ExpertTile(16, 16, 32, 4, 2)
    return ExpertTile(16, 16, 128, 4, 4)


def expert_tiles(dtype: str, *, are_many: bool) -> ExpertTiles:
    """What fits compute capability 9.0 without spilling.

    Of half precision both kinds are sums by the same instruction over the same pieces, of 64 rows
    of weights and 16 columns, so that a token's bits do not depend on how many others there are.
    """
    if dtype == "float32":
        tile = ExpertTile(32, 16, 32, 4, 2)
        return ExpertTiles(tile, tile)
    if are_many:
        return ExpertTiles(ExpertTile(64, 128, 64, 4, 3), ExpertTile(128, 128, 64, 8, 3))
    return ExpertTiles(ExpertTile(64, 16, 64, 4, 4), ExpertTile(128, 16, 64, 4, 4))


def choose_constants(experts: Experts) -> dict[str, int | bool]:
    """Of ``choose_kernel``."""
    pad = triton.next_power_of_2(experts.number)
    return {
        "LOGITS": experts.num_logits,
        "EXPERTS": experts.number,
        "PAD": pad,
        "CHOICES": experts.per_token,
        "NORMALISED": experts.normalised,
        "PIECE": min(pad, max(1, CHOOSE_PIECE_ELEMENTS // pad)),
    }


def group_constants(experts: Experts) -> dict[str, int]:
    """Of kernels over the pairs of held experts."""
    return {"EXPERTS": experts.held, "PAD": triton.next_power_of_2(experts.held)}


class ExpertOps:
    """The part of ``Ops`` that is for sparse MLPs."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def route(
        self, x: torch.Tensor, router: torch.Tensor, first_expert: int, room: ExpertRoom
    ) -> None:
        """See ``Ops``."""
        experts, (num, hidden) = self._experts, x.shape
        assert x.is_contiguous()
        tile = router_tile(self._spec.dtype)
        grid = triton.cdiv(experts.num_logits, tile.outs), triton.cdiv(num, tile.rows)
        router_kernel[grid](
            x,
            router,
            room.logits,
            num,
            LOGITS=experts.num_logits,
            HIDDEN=hidden,
            **tile.constants,
            **tile.options,
        )
        choose_kernel[num,](room.logits, room.chosen, room.shares, **choose_constants(experts))
        order_kernel[experts.held,](
            room.chosen,
            room.pairs,
            room.starts,
            len(room.pairs),
            first_expert,
            EXPERTS=experts.held,
            PIECE=ORDER_PIECE,
            num_warps=8,
        )

    def run_experts(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        first_expert: int,
        room: ExpertRoom,
    ) -> None:
        """See ``Ops``."""
        experts, hidden, inner = self._experts, x.shape[1], down.shape[1]
        num_pairs = len(room.pairs)
        tiles = self._tiles_of(num_pairs)
        num_tiles = num_pairs // tiles.gate.rows + experts.held
        sizes = {"HIDDEN": hidden, "INNER": inner, **group_constants(experts)}
        gate_kernel[triton.cdiv(inner, tiles.gate.outs), num_tiles](
            x,
            gate_up,
            room.gated,
            room.pairs,
            room.starts,
            CHOICES=experts.per_token,
            GELU=self._spec.has_gelu,
            **sizes,
            **tiles.gate.constants,
            **tiles.gate.options,
        )
        down_kernel[triton.cdiv(hidden, tiles.down.outs), num_tiles](
            room.gated,
            down,
            room.products,
            room.pairs,
            room.starts,
            **sizes,
            **tiles.down.constants,
            **tiles.down.options,
        )

    def sum_experts(
        self,
        first_expert: int,
        room: ExpertRoom,
        shared: torch.Tensor | None,
        hidden: torch.Tensor | None,
    ) -> None:
        """See ``Ops``."""
        experts, (num, _, width) = self._experts, room.products.shape
        out = room.sums if hidden is None else hidden
        assert out.is_contiguous() and (shared is None or shared.is_contiguous())
        sum_kernel[num, triton.cdiv(width, SUM_PIECE)](
            room.products,
            room.products if shared is None else shared,
            room.chosen,
            room.shares,
            room.logits,
            out,
            first_expert,
            EXPERTS=experts.held,
            CHOICES=experts.per_token,
            LOGITS=experts.num_logits,
            WIDTH=width,
            SHARED=shared is not None,
            ADDS=hidden is not None,
            PIECE=SUM_PIECE,
        )

    def _tiles_of(self, num_pairs: int) -> ExpertTiles:
        are_many = num_pairs >= LEAST_MANY * self._experts.number
        return expert_tiles(self._spec.dtype, are_many=are_many)

    @property
    def _experts(self) -> Experts:
        assert self._spec.experts is not None
        return self._spec.experts
