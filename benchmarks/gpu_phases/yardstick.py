"""P5b: attention of single tokens alone: ours over units, over packed layers, and FlashInfer's.

Units hold all layers of a block together, which drops need. Packed, the blocks of one layer lie
side by side, as in other servers: what units cost is the difference. FlashInfer is not needed, and
is measured where it is installed.
"""

import importlib
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.gpu_kit import tile_table
from benchmarks.gpu_kit.parts import Part
from benchmarks.gpu_phases.kernels import operations
from benchmarks.gpu_phases.machine import GIB, SHAPES, Machine
from benchmarks.gpu_phases.speed import kv_cache, single_tokens
from benchmarks.report import Report, Setting
from kunserve.engine.attention import TORCH_DTYPES, StepBatch
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.ops.table import DeviceBatch, Ops
from kunserve_extras.triton_ops.tiles import AttentionTiles, row_of, table_rows, tiles_for

_WORKSPACE_BYTES = 256 << 20
_TILES = ((32, 4, 3), (64, 4, 2), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 8, 2))
"""(Keys, warps, stages) beside those that serve."""
_PARTS = (16, 32)
"""And parts of a sequence."""


@dataclass(frozen=True, slots=True)
class _Case:
    """Sequences that decode, and the memory that their KV lies in."""

    machine: Machine
    spec: ModelSpec
    kv_bytes: torch.Tensor
    block_size: int
    num: int
    context: int

    def units(self, spec: ModelSpec) -> torch.Tensor:
        """The memory as units."""
        shape = (-1, 2, spec.num_kv_heads, self.block_size, spec.head_dim)
        return self.kv_bytes.view(TORCH_DTYPES[spec.dtype]).view(shape)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A query of each sequence, and where its output goes."""
        device, spec = self.machine.torch_device, self.spec
        q = torch.randn(self.num, spec.num_heads, spec.head_dim, device=device)
        q = q.to(TORCH_DTYPES[spec.dtype])
        return q, torch.empty(self.num, spec.q_size, dtype=q.dtype, device=device)

    def batch(self, spec: ModelSpec) -> StepBatch:
        """One token of each sequence."""
        return single_tokens(spec, self.num, self.context, self.block_size)

    def report(self, report: Report, name: str, work: Callable[[], object], tiles: str) -> float:
        """Bytes of KV that all layers read, over the seconds that they take."""
        seconds, _ = self.machine.seconds(work, 10)
        read = self.num * self.context * self.spec.num_layers * self.spec.unit_bytes(1)
        where: dict[str, Setting] = {
            "by": name,
            "tiles": tiles,
            "block_size": self.block_size,
            "batch": self.num,
            "context": self.context,
        }
        report.add("attention reads", read / seconds / 1e9, "GB/s", **where)
        return seconds


def run(machine: Machine, report: Report) -> None:
    """Ours at a few sizes, and with other tiles; then FlashInfer, which may compile for long."""
    sizes = (64, 16) if machine.is_real else (8,)
    over = partial(_over, machine, report)
    machine.do(
        *(Part(f"ours, blocks of {size}", partial(over, _ours, size)) for size in sizes),
        Part("other tiles", partial(_other_tiles, machine, report, sizes[0])),
        *(
            Part(f"flashinfer, blocks of {size}", partial(over, _flashinfer, size))
            for size in sizes
        ),
    )


def _over(
    machine: Machine, report: Report, measure: Callable[[Report, _Case], None], block_size: int
) -> None:
    """All cases with blocks of that size."""
    if measure is _flashinfer and importlib.util.find_spec("flashinfer") is None:
        report.add("not there", None, "", by="flashinfer", block_size=block_size)
        return
    for case in _with_memory(machine, block_size):
        measure(report, case)


def _with_memory(machine: Machine, block_size: int) -> Iterator[_Case]:
    """All cases, over the same memory; it is given back after the last."""
    spec, cases = SHAPES[_shape(machine)], list(_cases(machine))
    most = max(num * (context + block_size) for num, context in cases)
    with kv_cache(machine, spec, most, block_size) as kv:
        for case in cases:
            yield _Case(machine, spec, kv, block_size, *case)


def _cases(machine: Machine) -> Iterator[tuple[int, int]]:
    """(Sequences, tokens of each)."""
    yield from ((1, 32_768), (4, 8192), (64, 1024), (256, 1024)) if machine.is_real else ((2, 40),)


def _shape(machine: Machine) -> str:
    if not machine.is_real:
        return "tiny"
    free_bytes, _ = machine.driver().memory_bytes()
    return "7b" if free_bytes > 40 * GIB else "1.5b"


def _ours(report: Report, case: _Case) -> None:
    spec = case.spec
    ops = operations(spec)
    name = "triton" if "triton" in ops and case.machine.is_real else "torch"
    case.report(report, name, _attending(case, ops[name]), "served")
    # A model of one layer is packed; the layers lie one behind the other.
    alone = replace(spec, num_layers=1)
    packed_ops = operations(alone)[name]
    host = case.batch(alone)
    batch = DeviceBatch.of(host, case.block_size, case.machine.torch_device)
    layers = case.units(alone).tensor_split(spec.num_layers)
    assert len(layers[-1]) > int(host.tables.max()) + 1, (len(layers[-1]), host.tables.max())
    q, out = case.rows()

    def packed() -> None:
        for layer in layers:
            packed_ops.attend(0, q, layer, batch, out)

    case.report(report, f"{name}, packed", packed, "served")


def _attending(case: _Case, ops: Ops) -> Callable[[], None]:
    batch = DeviceBatch.of(case.batch(case.spec), case.block_size, case.machine.torch_device)
    kv = case.units(case.spec)
    q, out = case.rows()

    def attend() -> None:
        for layer in range(case.spec.num_layers):
            ops.attend(layer, q, kv, batch, out)

    return attend


def _other_tiles(machine: Machine, report: Report, block_size: int) -> None:
    """What might serve better here than what serves; the best becomes a table for this device."""
    spec = SHAPES[_shape(machine)]
    name = torch.cuda.get_device_name() if machine.is_real else "fake"
    if machine.is_real and importlib.util.find_spec("triton") is None:
        return
    serving = tiles_for(spec, name)
    served, seconds = _choice(serving), defaultdict[tile_table.Choice, list[float]](list)
    fewer = [(*served[:3], parts) for parts in _PARTS if parts < served[3]]
    choices = dict.fromkeys((served, *((*tile, served[3]) for tile in _TILES), *fewer))
    for case in _with_memory(machine, block_size):
        for choice in choices:
            tiles = "{} keys, {} warps, {} stages, {} parts".format(*choice)
            try:
                work = _attending(case, _with_tiles(machine, spec, serving, choice))
                seconds[choice].append(case.report(report, "triton", work, tiles))
            except Exception as error:
                # Tiles that do not fit say nothing about the others.
                report.add("not possible", None, "", tiles=tiles, why=type(error).__name__)
    chosen = tile_table.best(seconds, served)
    path = machine.folder / tile_table.TABLE
    tile_table.write(path, table_rows(), row_of(spec, name), chosen)
    report.add("tiles chosen", float(chosen != served), "", tiles=str(chosen), served=str(served))


def _choice(tiles: AttentionTiles) -> tile_table.Choice:
    one = tiles.single
    return one.keys, one.num_warps, one.num_stages, tiles.parts


def _with_tiles(
    machine: Machine, spec: ModelSpec, serving: AttentionTiles, choice: tile_table.Choice
) -> Ops:
    """Triton's kernels with such tiles; a rehearsal has plain torch, whatever the tiles."""
    if not machine.is_real:
        return operations(spec)["torch"]
    from kunserve_extras.triton_ops.ops import TritonOps

    keys, num_warps, num_stages, parts = choice
    single = replace(serving.single, keys=keys, num_warps=num_warps, num_stages=num_stages)
    return TritonOps(spec, replace(serving, single=single, parts=parts))


def _flashinfer(report: Report, case: _Case) -> None:
    """Its kernels over our units: the base is shifted by a layer, the table is the same."""
    flashinfer = importlib.import_module("flashinfer")
    spec, device = case.spec, case.machine.torch_device
    host = case.batch(spec)
    width = host.tables.shape[1]
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    last = (case.context - 1) % case.block_size + 1
    wrapper.plan(
        torch.arange(case.num + 1, dtype=torch.int32, device=device) * width,
        torch.from_numpy(host.tables).flatten().to(device),
        torch.full((case.num,), last, dtype=torch.int32, device=device),
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        case.block_size,
        q_data_type=TORCH_DTYPES[spec.dtype],
        kv_data_type=TORCH_DTYPES[spec.dtype],
    )
    kv = case.units(spec)
    q, _ = case.rows()

    def attend() -> None:
        for layer in range(spec.num_layers):
            wrapper.run(q, kv[layer + spec.num_layers :])

    case.report(report, "flashinfer", attend, "its own")
