"""Which graphs are recorded and launched; what is recorded reads only what lies on the device."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kunserve.core.layout import LayerRange
from kunserve.engine.attention import StepBatch
from kunserve_extras.torch_body.graph_inputs import GraphInputs
from kunserve_extras.torch_body.graphs import (
    MIXED_ROWS,
    ROWS,
    RUN_LAYERS,
    LayerGraphs,
    by_use,
    pieces_of,
    sizes_up_to,
)
from tests.specs import model_spec

NUM_LAYERS = 19


class Log:
    """A recorder that writes down which layers are asked for, and when."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []
        self.warmed: list[tuple[int, int]] = []
        self.first: list[tuple[int, int]] = []
        """Before any step was asked for."""

    def warm_up(self, work: Callable[[], None]) -> None:
        self.take()  # the launches of graphs that are recorded already
        work()
        self.warmed += self.take()

    def record(self, work: Callable[[], None]) -> "LogGraph":
        work()
        return LogGraph(self, self.take())

    def take(self) -> list[tuple[int, int]]:
        done, self.done = self.done, []
        return done


class LogGraph:
    def __init__(self, log: Log, work: list[tuple[int, int]]) -> None:
        self._log, self._work = log, work

    def replay(self) -> None:
        self._log.done += self._work


def recorded(log: Log, sizes: tuple[int, ...], within_s: float = 60.0) -> LayerGraphs:
    graphs = LayerGraphs(NUM_LAYERS, log)
    graphs.record(sizes, lambda rows: lambda layer: log.done.append((rows, layer)), within_s)
    log.first = log.take()
    return graphs


LOG = Log()
GRAPHS = recorded(LOG, (1, 2, 4))


@given(
    first=st.integers(0, NUM_LAYERS),
    end=st.integers(0, NUM_LAYERS),
    rows=st.sampled_from([1, 2, 4]),
)
def test_any_stage_is_made_of_graphs(first: int, end: int, rows: int) -> None:
    layers = LayerRange(min(first, end), max(first, end))
    before = GRAPHS.counts.launched
    GRAPHS.launch(rows, layers)
    assert LOG.take() == [(rows, layer) for layer in range(*layers)]
    assert GRAPHS.counts.launched - before == len(pieces_of(layers)) <= layers.num_layers
    assert GRAPHS.counts.recorded == 3 * (NUM_LAYERS + NUM_LAYERS // RUN_LAYERS)


def test_every_layer_is_compiled_before_it_is_recorded() -> None:
    log = Log()
    recorded(log, (2, 8))
    assert log.warmed == [(rows, layer) for rows in (8, 2) for layer in range(NUM_LAYERS)]


def test_every_graph_is_launched_once_at_the_start() -> None:
    """Each layer alone, and each within its run: no step behind a drop launches one first."""
    log = Log()
    graphs = recorded(log, (2,))
    in_runs = [
        layer for layer in range(NUM_LAYERS) if layer < NUM_LAYERS // RUN_LAYERS * RUN_LAYERS
    ]
    assert sorted(log.first) == sorted((2, layer) for layer in [*range(NUM_LAYERS), *in_runs])
    assert (graphs.counts.launched, graphs.counts.steps) == (0, 0)


def test_small_steps_use_the_next_larger_size() -> None:
    graphs = recorded(Log(), (1, 4, 8))
    assert [graphs.rows_for(rows) for rows in (1, 2, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, None]


def test_without_time_only_the_largest_size_is_recorded() -> None:
    graphs = recorded(Log(), (1, 4, 8), within_s=-1.0)
    assert graphs.sizes == (8,) and graphs.rows_for(1) == 8


@pytest.mark.parametrize(
    ("most", "sizes"), [(0, ()), (1, (1,)), (20, (1, 2, 4, 8, 16, 20)), (256, ROWS), (999, ROWS)]
)
def test_sizes(most: int, sizes: tuple[int, ...]) -> None:
    assert sizes_up_to(most) == sizes


@pytest.mark.parametrize("sizes", [ROWS, MIXED_ROWS, sizes_up_to(300, MIXED_ROWS)])
def test_whenever_time_is_over_what_is_recorded_holds_every_step(sizes: tuple[int, ...]) -> None:
    order = by_use(sizes)
    assert sorted(order) == list(sizes) and order[0] == sizes[-1]
    coarse = next(number for number in range(1, len(order)) if order[number] > order[number - 1])
    assert order[coarse - 1] == sizes[0], "first down to the smallest"
    kept = sorted(order[:coarse])
    assert all(2 * rows <= larger <= 4 * rows for rows, larger in itertools.pairwise(kept))


def test_a_mixed_step_that_the_device_needs_long_for_is_padded_by_a_quarter_at_most() -> None:
    """Below 257 tokens the host needs longer to ask for it than the device."""
    pairs = itertools.pairwise(rows for rows in MIXED_ROWS if rows >= 256)
    assert all(larger <= 1.25 * (rows + 1) for rows, larger in pairs)


def batch_of(contexts: list[int], num_tokens: list[int] | None = None) -> StepBatch:
    """One sequence for each context, its last tokens to be computed; block b is entry 10 s + b."""
    num_tokens = num_tokens or [1] * len(contexts)
    starts = np.cumsum([0, *num_tokens])
    positions = [
        position
        for context, num in zip(contexts, num_tokens, strict=True)
        for position in range(context - num, context)
    ]
    tables = np.arange(10 * len(contexts)).reshape(-1, 10)
    arrays = (positions, tables, range(len(contexts)), starts, contexts)
    positions, tables, rows, starts, lengths = (np.array(one, dtype=np.int32) for one in arrays)
    return StepBatch(positions, positions, tables, rows, starts, lengths, rows)


def test_a_batch_is_padded_with_what_nobody_uses() -> None:
    spec = model_spec(num_layers=6)
    inputs = GraphInputs(spec, 4, 8, 30, torch.device("cpu"))
    long = batch_of([9, 30, 1])
    assert inputs.holds(long)
    for batch in (batch_of([30] * 4), long):  # the second one is not to see the first
        filled = inputs.fill(4, batch)
    assert filled is inputs.batch(4) and filled.host is None
    assert filled.positions.tolist() == [8, 29, 0, 0]
    assert filled.entries.tolist() == [2, 17, 20, -6]
    assert filled.offsets.tolist() == [0, 1, 0, 0]
    assert filled.context_lens.tolist() == [9, 30, 1, 1]
    assert filled.q_starts.tolist() == [0, 1, 2, 3, 4]
    assert filled.tables[1].tolist() == list(range(10, 18))
    assert filled.tables[3].tolist() == [-6] * 8


def test_what_does_not_fit_is_not_held() -> None:
    inputs = GraphInputs(model_spec(num_layers=6), 4, 8, 30, torch.device("cpu"))
    assert not inputs.holds(batch_of([5, 9], [1, 2])), "a prompt"
    assert not inputs.holds(batch_of([33])), "longer than any request was to be"
