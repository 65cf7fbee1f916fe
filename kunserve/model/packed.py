"""Quantised weights as they lie in memory, and how many bytes that is."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

PANEL_ROWS = 16
"""Rows of a matrix that lie together."""
WEIGHTS_LAYOUT = 2
"""Counts the ways in which bytes of weights have lain in memory. Instances copy them from each
other, so those of another way must not be taken over: raise it with each change."""
BLOCK_COLUMNS = 32
"""Columns whose products are summed before they are scaled."""
_SUPERBLOCK = 256


class WeightFormat(enum.IntEnum):
    """How the rows of a matrix lie in memory. The kernels know the same numbers."""

    PLAIN = 0
    """Row after row, in the model's dtype."""
    Q8_0 = 1
    Q4_0 = 2
    Q4_1 = 3
    INT8 = 4
    """8 bits, and a scale per row."""
    Q4_K = 5
    Q6_K = 6
    # Those below are computed with on devices only.
    FP8 = 7
    """e4m3, and a scale per row."""
    FP8_128 = 8
    """e4m3, and a scale per row for each 128 columns."""
    INT4_32 = 9
    """4 bits, and a scale per row for each so many columns; 8 stands for 0."""
    INT4_64 = 10
    INT4_128 = 11

    @property
    def block_columns(self) -> int:
        """Columns must be a multiple of it."""
        if self in (WeightFormat.Q4_K, WeightFormat.Q6_K):
            return _SUPERBLOCK
        return _GROUPS.get(self, BLOCK_COLUMNS)

    def panel_bytes(self, num_columns: int) -> int:
        """Bytes of ``PANEL_ROWS`` rows: their scales, in lines of 64, and their values."""
        assert self is not WeightFormat.PLAIN and num_columns % self.block_columns == 0, self
        blocks, superblocks = num_columns // BLOCK_COLUMNS, num_columns // _SUPERBLOCK
        scales, values = {
            WeightFormat.Q8_0: (32 * blocks, 512),
            WeightFormat.Q4_0: (32 * blocks, 256),
            WeightFormat.Q4_1: (64 * blocks, 256),
            WeightFormat.INT8: (64, 512),
            WeightFormat.Q4_K: (64 * superblocks + 32 * blocks, 256),
            WeightFormat.Q6_K: (32 * superblocks + 32 * blocks, 384),
            WeightFormat.FP8: (64, 512),
            WeightFormat.FP8_128: (16 * blocks, 512),
            WeightFormat.INT4_32: (64 * blocks, 256),
            WeightFormat.INT4_64: (32 * blocks, 256),
            WeightFormat.INT4_128: (16 * blocks, 256),
        }[self]
        return -(-scales // 64) * 64 + blocks * values


_GROUPS = {
    WeightFormat.FP8_128: 128,
    WeightFormat.INT4_32: 32,
    WeightFormat.INT4_64: 64,
    WeightFormat.INT4_128: 128,
}
INT4 = {group: kind for kind, group in _GROUPS.items() if kind is not WeightFormat.FP8_128}
"""By how many columns share a scale."""
FP8_FORMATS = frozenset({WeightFormat.FP8, WeightFormat.FP8_128})
_ON_DEVICES = FP8_FORMATS | set(INT4.values())


class Kept(NamedTuple):
    """What somebody computes with as it is stored. Anything else is expanded when it is loaded."""

    formats: frozenset[WeightFormat] = frozenset()
    experts: bool = False
    """Also the matrices of experts."""


NOTHING_KEPT = Kept()
KEPT_ON_CPUS = Kept(frozenset(WeightFormat) - _ON_DEVICES - {WeightFormat.PLAIN}, experts=True)
KEPT_ON_DEVICES = Kept(_ON_DEVICES | {WeightFormat.INT8, WeightFormat.Q8_0, WeightFormat.Q4_0})


class Run(NamedTuple):
    """Consecutive rows of one format. Of gate and up, which alternate, pairs of rows."""

    format: WeightFormat
    num_rows: int

    def num_panels(self, *, is_paired: bool) -> int:
        """Panels, the last of which may have room for more rows."""
        return -(-self.num_rows // (PANEL_ROWS // 2 if is_paired else PANEL_ROWS))


PAIRED = frozenset({"gate_up", "experts_gate_up", "shared_gate_up"})
"""Tensors of which 8 rows of the first half lie beside 8 of the second one in every panel."""


class PackedField(NamedTuple):
    """A packed tensor of the engine: one or more runs, in the order of its rows.

    Of the matrices of experts each is a run, and all have one format.
    """

    name: str
    runs: tuple[Run, ...]
    num_columns: int

    @property
    def is_paired(self) -> bool:
        """Whether it is of ``PAIRED``."""
        return self.name in PAIRED

    @property
    def num_bytes(self) -> int:
        """Of all panels."""
        return sum(
            run.num_panels(is_paired=self.is_paired) * run.format.panel_bytes(self.num_columns)
            for run in self.runs
        )


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Which tensors of a model stay quantised, and what its parts take in memory."""

    method: str
    """As ``--quantization`` names it."""
    ends: tuple[PackedField, ...]
    """Outside the layers. What is missing is plain."""
    layers: tuple[tuple[PackedField, ...], ...]
    """Of each layer: they need not be alike."""
    layer_bytes: int
    """The same for every layer: those that need less are padded."""
    embedding_bytes: int
    head_bytes: int
    """Final norm, and the head unless it is the embedding."""
