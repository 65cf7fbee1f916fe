"""Which tiles attention gets, and how a measured one becomes a row of the table."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu_kit import tile_table
from kunserve.core.errors import ConfigError
from kunserve_extras.torch_body.ops.table import most_parts, sums_bytes
from kunserve_extras.triton_ops.tiles import Tile, row_of, table_rows, tiles_for
from tests.specs import model_spec

SPEC = model_spec(num_heads=28, num_kv_heads=4, head_dim=128, dtype="bfloat16")
SERVED = (64, 4, 3, 64)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "several", "single"),
    [
        (128, "bfloat16", Tile(128, 64, 8, 3), Tile(16, 64, 4, 3)),
        (64, "float16", Tile(128, 64, 8, 3), Tile(16, 64, 4, 3)),
        (256, "bfloat16", Tile(64, 32, 4, 2), Tile(16, 32, 8, 3)),
        (256, "float32", Tile(32, 16, 4, 2), Tile(16, 32, 4, 2)),
    ],
)
def test_a_device_that_nobody_has_measured_has_the_default(
    head_dim: int, dtype: str, several: Tile, single: Tile
) -> None:
    spec = model_spec(num_heads=28, num_kv_heads=4, head_dim=head_dim, dtype=dtype)
    tiles = tiles_for(spec, "some device")
    assert (tiles.several, tiles.single, tiles.parts) == (several, single, 64)


def test_what_was_measured_serves_there_and_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    tile_table.write(path, table_rows(), row_of(SPEC, "A"), (32, 4, 4, 16))
    tile_table.write(path, json.loads(path.read_text()), row_of(SPEC, "A"), (128, 8, 2, 32))
    rows = json.loads(path.read_text())
    assert len(rows) == len(table_rows()) + 1, "measured again, a row takes the other's place"
    measured, default = tiles_for(SPEC, "A", rows), tiles_for(SPEC)
    assert (measured.single, measured.parts) == (Tile(16, 128, 8, 2), 32)
    assert measured.several == default.several, "nobody has measured that"
    others = model_spec(num_heads=40, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    assert tiles_for(others, "A", rows) == tiles_for(others)
    assert tiles_for(SPEC, "B", rows) == default


@pytest.mark.parametrize(
    ("choice", "told"),
    [((96, 4, 3, 64), "96 keys"), ((64, 4, 3, 48), "48"), ((64, 4, 3, 128), "8")],
)
def test_what_the_kernels_cannot_do_is_refused(
    choice: tile_table.Choice, told: str, tmp_path: Path
) -> None:
    tile_table.write(tmp_path / "t", table_rows(), row_of(SPEC, "A"), choice)
    with pytest.raises(ConfigError, match=told):
        tiles_for(SPEC, "A", json.loads((tmp_path / "t").read_text()))


def test_the_fastest_in_all_cases_is_chosen_if_it_gains() -> None:
    fast, partial, slow = (64, 4, 4, 64), (128, 4, 2, 64), (32, 4, 3, 64)
    times = {SERVED: [2.0, 4.0], slow: [3.0, 3.9], partial: [0.1], fast: [1.5, 4.0]}
    assert tile_table.best(times, SERVED) == fast
    assert tile_table.best(times | {fast: [1.99, 4.0]}, SERVED) == SERVED


@pytest.mark.parametrize(("kv_heads", "parts"), [(1, 64), (4, 64), (5, 32), (8, 32), (32, 16)])
def test_models_of_few_heads_have_more_parts(kv_heads: int, parts: int) -> None:
    spec = model_spec(num_heads=kv_heads * 2, num_kv_heads=kv_heads, head_dim=128)
    assert most_parts(spec) == parts
    assert sums_bytes(spec, 3) == 3 * kv_heads * 2 * parts * 130 * 4
