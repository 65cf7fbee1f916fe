"""Small steps, recorded once as graphs and asked for with few calls.

Most are of one token per sequence. Mixed ones, of decodes and a little of a prompt, are recorded
for some numbers of tokens, because the host needs longer to ask for them than the device for them.

Steps of single tokens over the whole model are one graph each, from their tokens to the largest
logits. Stages have a graph for each layer, and for each run of some.

A graph keeps addresses. Those of weights and KV never change, so a drop or a restore changes only
which layers' graphs are launched, and nothing is recorded again.
"""

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kunserve.core.layout import LayerRange

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Sizes of steps of single tokens that are recorded. A smaller step is padded."""
MIXED_ROWS = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)
"""And of mixed ones, in tokens. From 256 on padding to twice as many would take the device longer
than asking for the step without graphs takes the host.
"""
RUN_LAYERS = 8
"""So many layers from a multiple of this on are also one graph, because each launch costs."""


class Graph(Protocol):
    """Work that was recorded."""

    def replay(self) -> None:
        """Ask for the same work again, over the same addresses."""
        ...


class Recorder(Protocol):
    """Records what is asked of a device."""

    def warm_up(self, work: Callable[[], None]) -> None:
        """Do the work once and wait for it, because compiling cannot be recorded."""
        ...

    def record(self, work: Callable[[], None]) -> Graph:
        """The work as a graph. It is not done yet."""
        ...


@dataclass(slots=True)
class GraphCounts:
    """What was recorded and asked for. ``recorded`` does not change after the start."""

    recorded: int = 0
    """Graphs."""
    launched: int = 0
    """Graphs, each time."""
    steps: int = 0
    """Steps by graphs."""
    whole_steps: int = 0
    """Those of them that were one graph, from tokens to the largest logits."""
    mixed_steps: int = 0
    """Those of them that may have had sequences of several tokens."""
    eager_steps: int = 0
    """Steps without: long prompts, mostly."""


def sizes_up_to(most: int, sizes: tuple[int, ...] = ROWS) -> tuple[int, ...]:
    """Which of the sizes to record for steps of up to ``most`` rows."""
    most = min(most, sizes[-1])
    return (*(rows for rows in sizes if rows < most), most) if most else ()


def by_use(sizes: tuple[int, ...]) -> list[int]:
    """In which order to record sizes, so that after any of them steps are padded little.

    The largest holds all steps; then those of half as many rows and less, and so on down; then
    again from the largest of what is left.
    """
    left, order = sorted(sizes, reverse=True), []
    while left:
        taken: list[int] = []
        for rows in left:
            if not taken or 2 * rows <= taken[-1]:
                taken.append(rows)
        order += taken
        left = [rows for rows in left if rows not in taken]
    return order


def pieces_of(layers: LayerRange) -> list[LayerRange]:
    """Which graphs make up a stage."""
    pieces, layer = [], layers.first
    while layer < layers.end:
        is_run = layer % RUN_LAYERS == 0 and layer + RUN_LAYERS <= layers.end
        end = layer + RUN_LAYERS if is_run else layer + 1
        pieces.append(LayerRange(layer, end))
        layer = end
    return pieces


class LayerGraphs:
    """For each size the graphs of every layer and of every run of layers."""

    def __init__(
        self, num_layers: int, recorder: Recorder, counts: GraphCounts | None = None
    ) -> None:
        """``counts`` may be another one's, too."""
        self._num_layers = num_layers
        self._recorder = recorder
        self._graphs: dict[int, dict[LayerRange, Graph]] = {}
        self._whole: dict[int, Graph] = {}
        self.counts = counts or GraphCounts()

    @property
    def sizes(self) -> tuple[int, ...]:
        """What is recorded, smallest first."""
        return tuple(sorted(self._graphs))

    def record(
        self,
        sizes: tuple[int, ...],
        begin: Callable[[int], Callable[[int], None]],
        within_s: float,
        whole: Callable[[int], None] | None = None,
    ) -> None:
        """Record all layers for each size.

        ``begin(rows)`` readies the inputs, and returns what asks for one layer. ``whole(rows)``
        asks for a whole step of so many rows, which is recorded then, too. The largest size
        comes first, because smaller steps can use it, and the others ``by_use``: no further one
        is begun after ``within_s``.
        """
        started = time.perf_counter()
        for number, rows in enumerate(by_use(sizes)):
            if number and time.perf_counter() - started > within_s:
                logger.warning("recorded graphs of %s rows only: time is over", self.sizes)
                return
            self._graphs[rows] = self._record_size(begin(rows))
            if whole is not None:
                self._whole[rows] = self._record_whole(functools.partial(whole, rows))
            logger.info(
                "recorded graphs rows=%d sizes=%d/%d graphs=%d seconds=%.1f",
                rows,
                number + 1,
                len(sizes),
                self.counts.recorded,
                time.perf_counter() - started,
            )

    def rows_for(self, num_rows: int) -> int | None:
        """The smallest recorded size that holds so many rows."""
        return min((rows for rows in self._graphs if rows >= num_rows), default=None)

    def launch(self, rows: int, layers: LayerRange) -> None:
        """Ask for these layers of a step of a recorded size."""
        graphs, pieces = self._graphs[rows], pieces_of(layers)
        for piece in pieces:
            graphs[piece].replay()
        self.counts.launched += len(pieces)
        self.counts.steps += 1

    def has_whole(self, rows: int) -> bool:
        """Whether whole steps of this size are recorded."""
        return rows in self._whole

    def launch_whole(self, rows: int) -> None:
        """Ask for a whole step of a recorded size."""
        self._whole[rows].replay()
        self.counts.launched += 1
        self.counts.steps += 1
        self.counts.whole_steps += 1

    def _record_whole(self, work: Callable[[], None]) -> Graph:
        self._recorder.warm_up(work)
        graph = self._recorder.record(work)
        self.counts.recorded += 1
        graph.replay()
        return graph

    def _record_size(self, run: Callable[[int], None]) -> dict[LayerRange, Graph]:
        def work_of(layers: LayerRange) -> Callable[[], None]:
            def work() -> None:
                for layer in range(*layers):
                    run(layer)

            return work

        whole = LayerRange(0, self._num_layers)
        self._recorder.warm_up(work_of(whole))
        alone = [LayerRange(layer, layer + 1) for layer in range(*whole)]
        runs = [piece for piece in pieces_of(whole) if piece.num_layers > 1]
        graphs = {piece: self._recorder.record(work_of(piece)) for piece in (*alone, *runs)}
        self.counts.recorded += len(graphs)
        # The first launch brings a graph to the device. Those of single layers are not needed
        # before a drop, and the steps behind it would wait for that.
        for graph in graphs.values():
            graph.replay()
        return graphs
