"""One instance's memory: packed weights, and KV units backed as far as granules reach."""

import logging
import threading
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kunserve.control.instance.body import Remap, UnitCopy
from kunserve.core.config import MIB, InstanceConfig
from kunserve.core.errors import TooLittleMemory
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.core.model_spec import ModelSpec
from kunserve.core.snapshots import InstanceSpec
from kunserve.engine import address_space
from kunserve.engine.arena import Arena, VirtualRange
from kunserve.engine.weights.layout import WeightLayout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How an instance's budget is divided while it holds every layer."""

    num_granules: int
    weights_granules: int
    kv_units: int

    @classmethod
    def of(cls, model: ModelSpec, config: InstanceConfig) -> "MemoryPlan":
        """Divide the budget; raises TooLittleMemory when not even one block fits."""
        granule = config.granule_bytes
        unit = model.unit_bytes(config.block_size)
        weights = WeightLayout(model, granule).num_granules
        if config.kv_cache_memory_bytes is None:
            num_granules = config.memory_bytes // granule
        else:
            num_granules = weights + -(-config.kv_cache_memory_bytes // granule)
        plan = cls(num_granules, weights, max(0, num_granules - weights) * granule // unit)
        if plan.kv_units < model.num_layers:
            block = model.block_bytes(config.block_size)
            needed = (weights + -(-block // granule)) * granule
            raise TooLittleMemory(
                f"{model.name} needs at least {_mib(needed)} per instance: "
                f"{_mib(weights * granule)} of weights in {model.dtype} and {_mib(block)} for one "
                f"KV block of {config.block_size} tokens; the instance has "
                f"{_mib(num_granules * granule)}, so the longest request that would fit has 0 "
                f"tokens. Give more with --instance-memory"
            )
        return plan


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"


class RemapFailed(SystemExit):
    """A remap stopped half-way, so the instance must end.

    No ``except Exception`` stops it: the other members of the transition count on memory that is
    not there, and the controller knows what to do about a dead instance.
    """

    EXIT_CODE = 71

    def __init__(self) -> None:
        super().__init__(self.EXIT_CODE)


class InstanceMemory:
    """The weights range, the KV range, and the granules that move between them."""

    def __init__(
        self,
        instance_id: InstanceId,
        model: ModelSpec,
        config: InstanceConfig,
        beside_bytes: int = 0,
    ) -> None:
        """``beside_bytes`` is what the instance will need beside weights and KV."""
        plan = MemoryPlan.of(model, config)
        granule = config.granule_bytes
        unit = model.unit_bytes(config.block_size)
        self.layout = WeightLayout(model, granule)
        self.arena = Arena(plan.num_granules * granule, granule, beside_bytes)
        self.spec = InstanceSpec(
            instance_id=instance_id,
            num_layers=model.num_layers,
            block_size=config.block_size,
            unit_bytes=unit,
            layer_bytes=model.layer_bytes,
            memory_bytes=plan.num_granules * granule,
            kv_units=plan.kv_units,
            granule_bytes=granule,
        )
        self.held = LayerRange(0, model.num_layers)
        # Entries may be as low as -num_layers: their addresses must exist, though never touched.
        self._guard_slots = -(-model.num_layers * unit // granule)
        try:
            self.weights = self.arena.reserve("weights", self.layout.num_bytes)
            self.kv = self.arena.reserve("kv", (self._guard_slots + plan.num_granules) * granule)
            self.arena.map(self.weights, 0, self.arena.take(plan.weights_granules), populate=True)
            self.arena.map(self.kv, self._guard_slots, self.arena.take(self.arena.num_free))
        except OSError as error:
            self.arena.close()
            raise TooLittleMemory(
                f"the machine cannot map {_mib(self.spec.memory_bytes)}: {error.strerror}"
            ) from error
        self._prefault = _Prefault(self.kv_base_address, self._tail_slot_bytes())

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

    def drop(self, keep: LayerRange) -> Remap:
        """Move every granule that holds only layers outside ``keep`` to the KV tail.

        Raises RemapFailed, which ends the process, when the system refuses a call half-way.
        """
        assert self.held.covers(keep) and keep.num_layers > 0, (self.held, keep)
        started = time.perf_counter()
        old_first, old_end = self.layout.granules_of(self.held)
        first, end = self.layout.granules_of(keep)
        for slot, num in ((old_first, first - old_first), (end, old_end - end)):
            if num > 0:
                self._move(self.weights, slot, self.kv, self._tail_slot, num)
        self.held = keep
        return self._remapped(first - old_first + old_end - end, started)

    def reclaim(self, layers: LayerRange) -> Remap:
        """Give back to the weights what ``layers`` (missing ones, or all to hold) need.

        The memory of layers already held keeps its content. Raises RemapFailed as ``drop`` does.
        """
        held = LayerRange(min(self.held.first, layers.first), max(self.held.end, layers.end))
        assert held.num_layers <= self.held.num_layers + layers.num_layers, (self.held, layers)
        started = time.perf_counter()
        old_first, old_end = self.layout.granules_of(self.held)
        first, end = self.layout.granules_of(held)
        # The reverse of a drop's order, so that runs of granules go back as they came.
        for slot, num in ((old_end, end - old_end), (first, old_first - first)):
            if num > 0:
                self._move(self.kv, self._tail_slot - num, self.weights, slot, num)
        self.held = held
        return self._remapped(-(old_first - first + end - old_end), started)

    def unit_view(self, unit: int, num_units: int) -> npt.NDArray[np.uint8]:
        """Bytes of consecutive backed units, [num_units * unit_bytes] uint8, no copy."""
        assert unit >= 0 and unit + num_units <= self.backed_units, (unit, num_units)
        unit_bytes = self.spec.unit_bytes
        offset = self._guard_slots * self.arena.granule_bytes + unit * unit_bytes
        return self.kv.bytes_view(offset, num_units * unit_bytes)

    def layer_view(self, layer: int) -> npt.NDArray[np.uint8]:
        """Bytes of a held layer's weights, packed and padded alike in every instance."""
        assert self.held.first <= layer < self.held.end, (layer, self.held)
        return self.weights.bytes_view(self.layout.layer_offset(layer), self.layout.layer.num_bytes)

    def copy_units(self, copies: tuple[UnitCopy, ...]) -> None:
        """Copy in order; a later copy may read what an earlier one wrote."""
        for copy in copies:
            self.unit_view(copy.dst, copy.num_units)[:] = self.unit_view(copy.src, copy.num_units)

    def check(self, ask_kernel: bool = False) -> None:
        """Assert that every granule is where the layers held say it must be."""
        self.arena.check(ask_kernel)
        first, end = self.layout.granules_of(self.held)
        wanted = np.zeros(self.layout.num_granules, dtype=bool)
        wanted[: self.layout.layers_offset // self.arena.granule_bytes] = True
        wanted[first:end] = True
        assert ((self.weights.granules >= 0) == wanted).all(), self.held
        backed = self.kv.granules >= 0
        assert backed[self._guard_slots : self._tail_slot].all(), self._tail_slot
        assert not backed[: self._guard_slots].any() and not backed[self._tail_slot :].any()
        assert self.arena.num_free == 0, self.arena.num_free
        assert self.backed_units >= self.kv_units, (self.backed_units, self.kv_units, self.held)

    def close(self) -> None:
        """Release everything. Tensors over this memory must not be touched any more."""
        self._prefault.stop()
        self.arena.close()

    @property
    def _tail_slot(self) -> int:
        """The first unbacked slot of the KV range: whatever is not weights is KV."""
        return self._guard_slots + self.kv.num_mapped

    def _tail_slot_bytes(self) -> int:
        return self.kv.num_mapped * self.arena.granule_bytes

    def _move(
        self, source: VirtualRange, slot: int, target: VirtualRange, target_slot: int, num: int
    ) -> None:
        try:
            self.arena.move(source, slot, target, target_slot, num)
        except OSError as error:
            logger.critical(
                "remap failed half-way, the instance ends: %s (held=[%d,%d) granules=%d from=%s "
                "to=%s; see vm.max_map_count and vm.overcommit_memory)",
                error.strerror,
                *self.held,
                num,
                source.name,
                target.name,
            )
            raise RemapFailed from error

    def _remapped(self, granules: int, started: float) -> Remap:
        moved_bytes = granules * self.arena.granule_bytes
        remap = Remap(self.kv_units, moved_bytes, time.perf_counter() - started)
        logger.info(
            "remap held=[%d,%d) moved_bytes=%d kv_units=%d seconds=%.6f",
            *self.held,
            moved_bytes,
            remap.kv_units,
            remap.seconds,
        )
        return remap


class _Prefault:
    """Touches the KV memory in the background.

    The first touch of a page costs several microseconds, which steps would pay otherwise. Pieces
    are small, since a remap waits for the one in progress.
    """

    _PIECE_BYTES = 128 * 1024

    def __init__(self, address: int, num_bytes: int) -> None:
        self._address = address
        self._num_bytes = num_bytes
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-prefault", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Return once no page is touched any more."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        for offset in range(0, self._num_bytes, self._PIECE_BYTES):
            size = min(self._PIECE_BYTES, self._num_bytes - offset)
            # A piece that a remap took away meanwhile fails to populate: nothing is lost.
            if self._stopping.is_set() or not address_space.populate(self._address + offset, size):
                return
