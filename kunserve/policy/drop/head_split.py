"""Which rows of the output head each stage of a pipeline computes.

Every stage holds the whole head, whatever it dropped. On the last stage alone it would make this
stage the slowest, by a half where the head weighs as much as eight of fifteen layers, and giving
that stage fewer layers would cost KV memory: the other stages would hold more. So rows are shared
out such that layers and rows together take every stage as long as nearly as can be.
"""

import itertools
from collections.abc import Sequence

from kunserve.core.layout import VocabRange
from kunserve.core.snapshots import HeadShape
from kunserve.model.packed import PANEL_ROWS


def split_head(stage_layers: Sequence[int], head: HeadShape) -> tuple[VocabRange, ...]:
    """The rows of each stage, in stage order; empty for one that has too many layers already.

    Like water: the head fills the shortest stages until all that got some are equally long.
    Shares are whole panels, because kernels compute the rows of a panel together.
    """
    assert stage_layers and head.num_rows > 0 and head.cost_layers > 0.0, (stage_layers, head)
    lengths: list[float] = [*stage_layers]
    lengths[0] += head.leader_layers
    level = _level(lengths, head.cost_layers)
    num_panels = head.num_rows // PANEL_ROWS
    ends, filled = [0], 0.0
    for layers in lengths:
        filled += max(0.0, level - layers) / head.cost_layers
        ends.append(round(min(1.0, filled) * num_panels) * PANEL_ROWS)
    last = max(i for i in range(len(stage_layers)) if ends[i + 1] > ends[i] or num_panels == 0)
    ends[last + 1 :] = [head.num_rows] * (len(stage_layers) - last)
    return tuple(VocabRange(first, end) for first, end in itertools.pairwise(ends))


def _level(stage_layers: Sequence[float], cost_layers: float) -> float:
    """How long the stages are that get a part."""
    total = cost_layers
    lengths = sorted(stage_layers)
    for count, length in enumerate(lengths, 1):
        total += length
        level = total / count
        if count == len(lengths) or level <= lengths[count]:
            return level
    raise AssertionError(stage_layers)
