"""One instance's memory: packed weights, and KV units backed as far as granules reach."""

import contextlib
import logging
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kunserve.control.instance.body import Remap, UnitCopy
from kunserve.core.config import InstanceConfig
from kunserve.core.errors import TooLittleMemory
from kunserve.core.faults import EXIT_REMAP_FAILED
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.core.snapshots import InstanceSpec
from kunserve.engine.memory.arena import Arena, VirtualRange
from kunserve.engine.memory.huge_pages import arrange
from kunserve.engine.memory.memory_plan import MemoryPlan, mib, padding_granules
from kunserve.engine.memory.pages import HostPages, OpenPages, Spans, pair_up
from kunserve.engine.memory.second_places import Move, SecondPlaces
from kunserve.engine.memory.weights_file import WeightsFile
from kunserve.engine.weights.layout import WeightLayout
from kunserve.model.spec import ModelSpec
from kunserve.transport.bulk.movable_memory import (
    Content,
    Extents,
    Granules,
    InFile,
    Mapped,
    Places,
    UnitRuns,
)

logger = logging.getLogger(__name__)


class RemapFailed(SystemExit):
    """A remap stopped half-way, so the instance must end.

    No ``except Exception`` stops it: the other members of the transition count on memory that is
    not there, and the controller knows what to do about a dead instance.
    """

    def __init__(self) -> None:
        super().__init__(EXIT_REMAP_FAILED)


class InstanceMemory:
    """The weights range, the KV range, and the granules that change between them.

    Host memory is moved, in one call. Device memory is first mapped a second time, while its old
    addresses are in use (``prepare``). The change itself is then one of books, and the old
    addresses are unmapped later (``tidy``). Both go a few granules at a time.
    """

    def __init__(
        self,
        instance_id: InstanceId,
        model: ModelSpec,
        config: InstanceConfig,
        beside_bytes: int = 0,
        open_pages: OpenPages = HostPages,
        *,
        backs_guard: bool = False,
        weights_file: WeightsFile | None = None,
    ) -> None:
        """``beside_bytes`` is what the instance will need beside weights and KV.

        With ``backs_guard`` there is memory below unit 0, too, for padding to be written to. With
        a ``weights_file`` weights are there, for others too, and all of the arena is KV.
        """
        plan = MemoryPlan.of(model, config)
        granule = config.granule_bytes
        own_weights = plan.weights_granules if weights_file is None else 0
        kv_granules = plan.num_granules - plan.weights_granules
        self.layout = WeightLayout(model, granule)
        # Entries may be as low as -num_layers: their addresses must exist.
        self._guard_slots = padding_granules(model, config)
        self._guard_granules = self._guard_slots if backs_guard else 0
        num_bytes = (own_weights + kv_granules + self._guard_granules) * granule
        self.arena = Arena(open_pages(num_bytes, granule, beside_bytes))
        if not backs_guard:
            # Addresses only, so that KV's slots and granules leave the same remainder.
            ahead = own_weights - self._guard_slots
            self._guard_slots += ahead % self.arena.pages.granules_per_page
        self.spec = InstanceSpec(
            instance_id=instance_id,
            num_layers=model.num_layers,
            block_size=config.block_size,
            unit_bytes=model.unit_bytes(config.block_size),
            layer_bytes=model.layer_bytes,
            memory_bytes=plan.num_granules * granule,
            kv_units=plan.kv_units,
            granule_bytes=granule,
            shared_weights_bytes=0 if weights_file is None else weights_file.num_bytes,
        )
        self.weights_file = weights_file
        """None: the instance has weights of its own, and may drop them."""
        self.held = LayerRange(0, model.num_layers)
        self._second_places = SecondPlaces(self.arena)
        self._noted: list[tuple[int, int, int]] | None = None
        """Copies of what is mapped, within ``at_once``."""
        try:
            self.weights, self.kv = self._map_all(own_weights, kv_granules)
        except OSError as error:
            self.arena.close()
            raise TooLittleMemory(
                f"the machine cannot map {mib(self.spec.memory_bytes)}: {error.strerror}"
            ) from error
        self.arena.pages.prefault(self.kv_base_address, self._tail_slot_bytes())

    def _map_all(self, own_weights: int, kv_granules: int) -> tuple[VirtualRange, VirtualRange]:
        """The weights range and the KV range while every layer is held."""
        arena, guard_slots = self.arena, self._guard_slots
        weights = arena.reserve("weights", self.layout.num_bytes)
        most = guard_slots + own_weights + kv_granules
        kv = arena.reserve("kv", most * arena.granule_bytes)
        if self.weights_file is not None:
            self.weights_file.map_at(weights.base_address)
        arena.map(weights, 0, arena.take(own_weights), populate=True)
        if self._guard_granules:
            arena.map(kv, 0, arena.take(self._guard_granules))
        arena.map(kv, guard_slots, arena.take(arena.num_free))
        return weights, kv

    @property
    def kv_base_address(self) -> int:
        """Address of unit 0; ``num_layers`` units of address space lie below it."""
        return self.kv.address_of(self._guard_slots)

    @property
    def kv_units(self) -> int:
        """Units to be used now: exactly what the spec promises for the layers held."""
        return self.spec.units_when_holding(self.held.num_layers)

    @property
    def backed_units(self) -> int:
        """Units that lie wholly in mapped memory; at least ``kv_units``."""
        return self._tail_slot_bytes() // self.spec.unit_bytes

    def backs(self, bounds: tuple[int, int] | None, layers: LayerRange) -> bool:
        """Whether all weights and units are mapped that a step over these layers touches.

        ``bounds`` are its lowest and its highest entry, if it has any. A touch of anything else is
        the end of the process, on a GPU without a word of which.
        """
        if not self.held.covers(layers) or not layers.num_layers:
            return False
        if bounds is None:
            return True
        first, last = bounds[0] + layers.first, bounds[1] + layers.end - 1
        return first >= 0 and last < self.backed_units

    def prepare(self, layers: LayerRange) -> str | None:
        """Do a piece of what may fail of a change to ``layers``, more or fewer; or say why not.

        What is held stays in use. Another change takes the place of this one, so preparing for
        what is held calls it off.
        """
        if self._second_places.wanted != layers:
            self._second_places.forget()
            if self.arena.pages.moves or layers == self.held:
                return None
            self._second_places.want(layers, self._moves_to(layers))
        return self._second_places.prepare()

    @property
    def is_preparing(self) -> bool:
        """See ``control.instance.body.Memory``."""
        return self._second_places.is_preparing

    @property
    def tidied_s(self) -> float | None:
        """See ``control.instance.body.Memory``."""
        return self._second_places.tidied_s

    def drop(self, keep: LayerRange) -> Remap:
        """Turn every granule that holds only layers outside ``keep`` into the KV tail.

        Raises RemapFailed, which ends the process, when the system refuses what was not prepared.
        """
        assert self.held.covers(keep) and keep.num_layers > 0, (self.held, keep)
        assert self.weights_file is None or keep == self.held, "shared weights are not dropped"
        return self._hold(keep)

    def reclaim(self, layers: LayerRange) -> Remap:
        """Give back to the weights what ``layers`` (missing ones, or all to hold) need.

        The memory of layers already held keeps its content. Raises RemapFailed as ``drop`` does.
        """
        held = LayerRange(min(self.held.first, layers.first), max(self.held.end, layers.end))
        assert held.num_layers <= self.held.num_layers + layers.num_layers, (self.held, layers)
        return self._hold(held)

    @property
    def huge_bytes(self) -> int:
        """How much of the memory lies in huge pages of the host."""
        return self.arena.pages.huge_bytes

    @property
    def weights_bytes(self) -> int:
        """Granules that hold weights while every layer is held."""
        return self.layout.num_bytes

    def tidy(self) -> None:
        """Unmap some addresses that were left. Call it often, between steps."""
        self._second_places.tidy()

    def unit_view(self, unit: int, num_units: int) -> npt.NDArray[np.uint8]:
        """Bytes of consecutive backed units, [num_units * unit_bytes] uint8, no copy."""
        assert unit >= 0 and unit + num_units <= self.backed_units, (unit, num_units)
        unit_bytes = self.spec.unit_bytes
        offset = self._guard_slots * self.arena.granule_bytes + unit * unit_bytes
        return self.kv.bytes_view(offset, num_units * unit_bytes)

    def layer_view(self, layer: int) -> npt.NDArray[np.uint8]:
        """Bytes of a held layer's weights, packed and padded alike in every instance."""
        assert self.held.first <= layer < self.held.end, (layer, self.held)
        return self.weights.bytes_view(self.layout.layer_offset(layer), self.layout.layer_bytes)

    @property
    def unit_bytes(self) -> int:
        """Of one unit."""
        return self.spec.unit_bytes

    @property
    def layer_bytes(self) -> int:
        """Of one layer's packed weights."""
        return self.layout.layer_bytes

    def read_units(self, unit_runs: UnitRuns, into: npt.NDArray[np.uint8]) -> None:
        """Copy the bytes of backed units, run after run."""
        self.arena.pages.read([self._unit_span(*run) for run in unit_runs], into)

    def write_units(self, unit_runs: UnitRuns, data: Content) -> None:
        """The reverse."""
        self._put([self._unit_span(*run) for run in unit_runs], data)

    def read_layer(self, layer: int, offset: int, into: npt.NDArray[np.uint8]) -> None:
        """Copy bytes of a held layer's packed weights."""
        self.arena.pages.read([self._layer_span(layer, offset, into.nbytes)], into)

    def write_layer(self, layer: int, offset: int, data: Content) -> None:
        """The reverse."""
        self._put([self._layer_span(layer, offset, data.nbytes)], data)

    def _put(self, spans: Spans, data: Content) -> None:
        pages = self.arena.pages
        if isinstance(data, Mapped):
            if self._noted is not None:
                self._noted += pair_up(spans, data.spans)
            else:
                pages.copy(pair_up(spans, data.spans))
        elif isinstance(data, InFile):
            assert isinstance(pages, HostPages), data
            pages.fill(spans, data)
        else:
            pages.write(spans, data)

    @property
    def shards(self) -> "tuple[InstanceMemory]":
        """See ``engine.memory.memory.Memory``."""
        return (self,)

    @property
    def places(self) -> Places:
        """See ``MovableMemory``."""
        return self

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """See ``Places``."""
        self._noted = []
        try:
            yield
            self.arena.pages.copy(self._noted)
        finally:
            self._noted = None

    @property
    def shared_fd(self) -> int | None:
        """The file of all granules; None where memory is no file."""
        pages = self.arena.pages
        return pages.fd if isinstance(pages, HostPages) else None

    @property
    def granules(self) -> Granules | None:
        """What peers on this host can map; None where they cannot."""
        return self.arena.pages.shared

    def locate_units(self, unit_runs: UnitRuns) -> Extents:
        """Where backed units lie in the file, run after run."""
        return self._locate(self.kv, [self._unit_span(*run) for run in unit_runs])

    def locate_layer(self, layer: int, offset: int, num_bytes: int) -> Extents:
        """Where bytes of a held layer's packed weights lie in the file."""
        return self._locate(self.weights, [self._layer_span(layer, offset, num_bytes)])

    def _locate(self, where: VirtualRange, spans: Spans) -> Extents:
        """Stretches of the file behind stretches of addresses; neighbours are joined."""
        size = self.arena.granule_bytes
        found: list[tuple[int, int]] = []
        for address, num_bytes in spans:
            position, end = address - where.base_address, address - where.base_address + num_bytes
            while position < end:
                slot, within = divmod(position, size)
                length = min(size - within, end - position)
                assert where.granules[slot] >= 0, (where.name, slot)
                offset = self.arena.pages.file_offset + int(where.granules[slot]) * size + within
                if found and sum(found[-1]) == offset:
                    found[-1] = (found[-1][0], found[-1][1] + length)
                else:
                    found.append((offset, length))
                position += length
        return found

    def put_weights(self, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy bytes to mapped memory of the weights range."""
        self.arena.pages.write([(self.weights.base_address + offset, data.nbytes)], data)

    def copy_units(self, copies: tuple[UnitCopy, ...]) -> None:
        """Copy in order; a later copy may read what an earlier one wrote."""
        span = self._unit_span
        self.arena.pages.copy([(span(dst, num)[0], *span(src, num)) for src, dst, num in copies])

    def units_at(self, unit: int, num_units: int) -> int:
        """Address of consecutive backed units."""
        return self._unit_span(unit, num_units)[0]

    def _unit_span(self, unit: int, num_units: int) -> tuple[int, int]:
        assert unit >= 0 and unit + num_units <= self.backed_units, (unit, num_units)
        unit_bytes = self.spec.unit_bytes
        return self.kv_base_address + unit * unit_bytes, num_units * unit_bytes

    def _layer_span(self, layer: int, offset: int, num_bytes: int) -> tuple[int, int]:
        assert self.held.first <= layer < self.held.end, (layer, self.held)
        assert offset >= 0 and offset + num_bytes <= self.layer_bytes, (offset, num_bytes)
        return self.weights.base_address + self.layout.layer_offset(layer) + offset, num_bytes

    def check(self, ask_kernel: bool = False) -> None:
        """Assert that every granule is where the layers held say it must be."""
        self.arena.check(ask_kernel)
        first, end = self.layout.granules_of(self.held)
        wanted = np.zeros(self.layout.num_granules, dtype=bool)
        wanted[: self.layout.layers_offset // self.arena.granule_bytes] = True
        wanted[first:end] = True
        wanted &= self.weights_file is None
        assert ((self.weights.granules >= 0) == wanted).all(), self.held
        backed = self.kv.granules >= 0
        assert backed[self._guard_slots : self._tail_slot].all(), self._tail_slot
        assert backed[: self._guard_slots].sum() == self._guard_granules, self._guard_granules
        assert not backed[self._tail_slot :].any(), self._tail_slot
        assert self.arena.num_free == 0, self.arena.num_free
        assert self.backed_units >= self.kv_units, (self.backed_units, self.kv_units, self.held)

    def close(self) -> None:
        """Release everything. Tensors over this memory must not be touched any more."""
        self.arena.close()
        if self.weights_file is not None:
            self.weights_file.close()

    @property
    def _tail_slot(self) -> int:
        """The first unbacked slot of the KV range: whatever is not weights is KV."""
        return self._guard_slots + self._kv_granules

    @property
    def _kv_granules(self) -> int:
        """Granules from unit 0 on."""
        return self.kv.num_mapped - self._guard_granules

    def _tail_slot_bytes(self) -> int:
        return self._kv_granules * self.arena.granule_bytes

    def _moves_to(self, layers: LayerRange) -> list[Move]:
        """The stretches of granules that a change to ``layers`` takes to the other range."""
        first, end = self.layout.granules_of(layers)
        old_first, old_end = self.layout.granules_of(self.held)
        moves, tail = [], self._tail_slot
        if self.held.covers(layers):
            for slot, num in ((old_first, first - old_first), (end, old_end - end)):
                moves.append(Move(self.weights, slot, self.kv, tail, num))
                tail += num
        else:
            # The reverse of a drop's order, so that runs of granules go back as they came.
            for slot, num in ((old_end, end - old_end), (first, old_first - first)):
                tail -= num
                moves.append(Move(self.kv, tail, self.weights, slot, num))
        return [piece for move in moves for piece in self._in_whole_pages(move)]

    def _in_whole_pages(self, move: Move) -> list[Move]:
        """The same granules moved so that huge pages stay whole. No content of them is needed."""
        source, slot, target, target_slot, num = move
        granules = source.granules[slot : slot + num]
        per_page = self.arena.pages.granules_per_page
        return [
            Move(source, slot + piece.first, target, target_slot + piece.place, piece.num)
            for piece in arrange(granules, target_slot, per_page)
        ]

    def _hold(self, layers: LayerRange) -> Remap:
        started = time.perf_counter()
        before = self.kv.num_mapped
        moves = self._moves_to(layers)
        if self.arena.pages.moves:
            for move in moves:
                self._move(move)
        else:
            refusal = self.prepare(layers)
            while refusal is None and self.is_preparing:
                refusal = self.prepare(layers)
            if refusal is not None:
                logger.critical("remap failed, the instance ends: %s", refusal)
                raise RemapFailed
            for source, slot, _, _, num in moves:
                self.arena.switch(source, slot, num)
        self.held = layers
        return self._remapped(self.kv.num_mapped - before, started)

    def _move(self, move: Move) -> None:
        try:
            self.arena.move(*move)
        except OSError as error:
            logger.critical(
                "remap failed half-way, the instance ends: %s (held=[%d,%d) granules=%d from=%s "
                "to=%s; see vm.max_map_count and vm.overcommit_memory)",
                error.strerror,
                *self.held,
                move.num,
                move.source.name,
                move.target.name,
            )
            raise RemapFailed from error

    def _remapped(self, granules: int, started: float) -> Remap:
        moved_bytes = granules * self.arena.granule_bytes
        seconds, prepare_s = time.perf_counter() - started, self._second_places.changed()
        logger.info(
            "remap held=[%d,%d) moved_bytes=%d kv_units=%d seconds=%.6f prepare_s=%.6f",
            *self.held,
            moved_bytes,
            self.kv_units,
            seconds,
            prepare_s,
        )
        return Remap(self.kv_units, moved_bytes, seconds, prepare_s)
