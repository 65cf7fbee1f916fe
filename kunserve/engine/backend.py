"""Where an instance's memory lies and what computes there: the CPU with its C kernels, or torch."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, TypedDict

import torch

from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.errors import ConfigError
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.attention import c_model
from kunserve.engine.cpu.decoder import Decoder, StepDecoder, StepLimits
from kunserve.engine.cpu.hidden_rows import Hidden, HiddenRows, bytes_of
from kunserve.engine.cpu.kernels.library import library
from kunserve.engine.cpu.kernels.panels import PANEL_FORMAT
from kunserve.engine.cpu.split_head import Part
from kunserve.engine.host_kv import HostKv
from kunserve.engine.layer_weights import ModelWeights
from kunserve.engine.memory.instance_memory import InstanceMemory
from kunserve.engine.memory.memory import Memory
from kunserve.engine.memory.memory_plan import MemoryPlan
from kunserve.engine.memory.pages import HostPages, OpenPages
from kunserve.engine.memory.weights_file import SharedWeights, WeightsFile
from kunserve.engine.memory.wrap import wrap
from kunserve.engine.sampling.sampler import Sampler
from kunserve.engine.sampling.structured.forms import Forms
from kunserve.engine.ways_ahead import NO_WAYS, WaysAhead
from kunserve.engine.weights.formats import shape_of
from kunserve.engine.weights.layout import WeightLayout
from kunserve.engine.weights.loader import WeightLoader, packed_weights
from kunserve.engine.weights.readers import Reader
from kunserve.engine.weights.shared_loader import SharedLoader
from kunserve.model.packed import KEPT_ON_CPUS, NOTHING_KEPT, WEIGHTS_LAYOUT, Kept
from kunserve.model.source import ModelSource
from kunserve.model.spec import ModelSpec
from kunserve.transport.bulk.host_store import HostStore
from kunserve.transport.bulk.movable_memory import WriteGate

Wait: TypeAlias = Callable[[Callable[[], None] | None], None]
"""Returns when something is computed; meanwhile it calls what it is given often, if anything."""


class Loader(Protocol):
    """Fills a model's packed tensors from files."""

    def check(self) -> None:
        """Raise ModelFiles unless everything is there, before any time is spent on reading."""
        ...

    def load_ends(self) -> None:
        """Read what lies outside the layers: embedding, final norm, head."""
        ...

    def load_layers(self, layers: LayerRange, gate: WriteGate | None = None) -> None:
        """Read these layers, whose memory must be mapped. ``gate``: as ``WeightLoader``'s."""
        ...


class Backend(Protocol):
    """What differs between bodies."""

    device: torch.device
    open_pages: OpenPages
    pads_steps: bool
    """Whether steps are padded with tokens whose K and V go to the units below unit 0."""
    computes_aside: bool
    """Whether a step is only asked for, and computed while the host does something else."""
    hop_rows: int
    """How many rows of the model's width each token takes to the next stage."""
    splits_head: bool
    """Whether a pipeline's stages compute the output head together."""
    has_panels: bool
    """Whether matrices lie in panels. So all instances of a cluster have them, or none."""
    rows_are_alike: bool
    """Whether a token's bits are the same whichever of its sequence's are computed with it."""
    ahead: WaysAhead
    """Past hosts to other stages, once ``open_hops`` was called."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be asked for before the last one's tokens are here."""
        ...

    @property
    def other_pids(self) -> tuple[int, ...]:
        """Processes that hold and compute the instance with this one."""
        ...

    def shape(self, source: ModelSource, model: ModelConfig) -> ModelSpec:
        """The model's shape, with its weights as they are to lie in memory."""
        ...

    def settle(self, spec: ModelSpec, config: InstanceConfig, most: StepLimits) -> InstanceConfig:
        """The settings to be used; raises ConfigError for what cannot run here.

        ``most`` bounds the steps, whose memory is part of an instance's share of a device.
        """
        ...

    def buffer_bytes(self, spec: ModelSpec, limits: StepLimits) -> int:
        """What steps within these limits need beside weights and KV."""
        ...

    def open_memory(
        self,
        instance_id: InstanceId,
        spec: ModelSpec,
        config: InstanceConfig,
        beside_bytes: int,
    ) -> Memory:
        """Take it; what it will need ``beside_bytes`` for is not part of it."""
        ...

    def weights(self, memory: Memory, spec: ModelSpec) -> ModelWeights:
        """The packed tensors of the memory that this process computes with."""
        ...

    def loader(
        self, reader: Reader, spec: ModelSpec, memory: Memory, weights: ModelWeights
    ) -> Loader:
        """What fills the weights."""
        ...

    def decoder(
        self, spec: ModelSpec, weights: ModelWeights, memory: Memory, config: InstanceConfig
    ) -> StepDecoder:
        """What computes."""
        ...

    def sampler(self, eos_ids: Sequence[int], vocab_size: int, forms: Forms) -> Sampler:
        """What chooses tokens."""
        ...

    def host_kv(self, memory: Memory, num_bytes: int | None) -> HostKv:
        """Where swapped and parked KV waits, so much at most. None: nobody has bounded it."""
        ...

    def mark(self) -> Wait:
        """Waits for all that was asked for so far, and for nothing that is asked for later."""
        ...

    def open_hops(self, address: str) -> None:
        """Peers know this instance by ``address``, and may write hidden states into its memory. Of
        a ``tcp://`` one they know the host, and may send them by other ways than the links.
        """
        ...

    def give(self, hidden: Hidden | Part, to: str) -> memoryview:
        """For the links: bytes of ``hidden``, or where they were written at the peer ``to``."""
        ...

    def take(self, data: bytes | bytearray | memoryview, row_bytes: int) -> HiddenRows:
        """The inverse."""
        ...


def weights_in(
    memory: InstanceMemory, spec: ModelSpec, device: torch.device, *, in_panels: bool
) -> ModelWeights:
    """The packed tensors over an instance's weights range, see ``packed_weights``."""
    layout = memory.layout
    whole = wrap(memory.weights.base_address, layout.num_bytes, device)
    return packed_weights(layout, spec, whole, in_panels=in_panels)


class OwnDecoders:
    """The part of ``Backend`` that is alike where our decoders compute."""

    hop_rows = 1
    ahead: WaysAhead = NO_WAYS
    kept: Kept = NOTHING_KEPT
    """What they compute with as it is stored."""

    def shape(self, source: ModelSource, model: ModelConfig) -> ModelSpec:
        """See ``Backend``."""
        return shape_of(source, model, self.kept)

    def host_kv(self, memory: Memory, num_bytes: int | None) -> HostKv:
        """See ``Backend``. Taken as it is needed."""
        return HostStore(memory)

    def open_hops(self, address: str) -> None:
        """See ``Backend``: hidden states are bytes."""

    def give(self, hidden: Hidden | Part, to: str) -> memoryview:
        """See ``Backend``."""
        return bytes_of(hidden)

    def take(self, data: bytes | bytearray | memoryview, row_bytes: int) -> HiddenRows:
        """See ``Backend``."""
        return HiddenRows.of_bytes(data, row_bytes)


class OneMemory(OwnDecoders):
    """The part of ``Backend`` that is alike where one process has all of an instance's memory."""

    device: torch.device
    open_pages: OpenPages
    pads_steps: bool
    has_panels: bool

    @property
    def other_pids(self) -> tuple[int, ...]:
        """See ``Backend``."""
        return ()

    def open_memory(
        self,
        instance_id: InstanceId,
        spec: ModelSpec,
        config: InstanceConfig,
        beside_bytes: int,
    ) -> InstanceMemory:
        """See ``Backend``."""
        pages, guard = self._pages_of(spec, config), self.pads_steps
        file = self._weights_file(spec, config)
        return InstanceMemory(
            instance_id, spec, config, beside_bytes, pages, backs_guard=guard, weights_file=file
        )

    def _weights_file(self, spec: ModelSpec, config: InstanceConfig) -> WeightsFile | None:
        return None

    def _pages_of(self, spec: ModelSpec, config: InstanceConfig) -> OpenPages:
        return self.open_pages

    def weights(self, memory: Memory, spec: ModelSpec) -> ModelWeights:
        """See ``Backend``."""
        return weights_in(memory.shards[0], spec, self.device, in_panels=self.has_panels)


def kv_in(memory: InstanceMemory, device: torch.device) -> torch.Tensor:
    """The bytes of all units that can ever be, from ``num_layers`` units below unit 0 on."""
    spec = memory.spec
    below = spec.num_layers * spec.unit_bytes
    room = memory.kv.address_of(memory.kv.num_slots) - memory.kv_base_address
    units = room // spec.unit_bytes
    return wrap(memory.kv_base_address - below, below + units * spec.unit_bytes, device)


class HugePages(TypedDict):
    """What ``HostPages`` is told of huge pages."""

    huge: bool
    first_bytes: int


def huge_pages_of(spec: ModelSpec, config: InstanceConfig) -> HugePages:
    """Weights lie in them before they are loaded, KV when there is time for it."""
    weights_bytes = MemoryPlan.of(spec, config).weights_granules * config.granule_bytes
    first_bytes = 0 if config.weight_sharers else weights_bytes
    return HugePages(huge=config.huge_pages == "auto", first_bytes=first_bytes)


def weights_file_of(
    shared: SharedWeights | None, spec: ModelSpec, config: InstanceConfig
) -> WeightsFile | None:
    """The copy that an instance, or one of its ranks, shares; None if it has its own."""
    assert (shared is None) == (not config.weight_sharers), (shared, config.weight_sharers)
    if shared is None:
        return None
    words = f"{WEIGHTS_LAYOUT} {PANEL_FORMAT} {spec}".encode()
    fingerprint = {
        **shared.fingerprint,
        "dtype": spec.dtype,
        "quantization": "none" if spec.packed is None else spec.packed.method,
        "layout": hashlib.sha256(words).hexdigest()[:16],
    }
    layout, huge = WeightLayout(spec, config.granule_bytes), config.huge_pages == "auto"
    return WeightsFile(shared.fds[0], fingerprint, layout, huge=huge)


def cpu_loader(reader: Reader, spec: ModelSpec, memory: InstanceMemory) -> Loader:
    """What fills the weights of a process: its own, or by turns what it shares."""
    file, layout, address = memory.weights_file, memory.layout, memory.weights.base_address
    filled_at = address if file is None else file.window
    whole = wrap(filled_at, layout.num_bytes, CpuBackend.device)
    weights = packed_weights(layout, spec, whole, in_panels=CpuBackend.has_panels)
    loader = WeightLoader(reader, layout, spec, weights)
    return loader if file is None else SharedLoader(loader, file, address)


def nothing_to_wait_for(look_up: Callable[[], None] | None) -> None:
    """A ``Wait``: what was asked for was computed at once."""


class CpuBackend(OneMemory):
    """Host memory and our C kernels."""

    device = torch.device("cpu")
    open_pages: OpenPages = HostPages
    pads_steps = False
    computes_aside = False
    runs_ahead = False
    kept = KEPT_ON_CPUS
    splits_head = True
    has_panels = True
    rows_are_alike = True

    def __init__(self, shared: SharedWeights | None = None) -> None:
        """``shared`` is what ``InstanceConfig.weight_sharers`` asks for."""
        self._shared = shared

    def _weights_file(self, spec: ModelSpec, config: InstanceConfig) -> WeightsFile | None:
        return weights_file_of(self._shared, spec, config)

    def _pages_of(self, spec: ModelSpec, config: InstanceConfig) -> OpenPages:
        return functools.partial(HostPages, **huge_pages_of(spec, config))

    def settle(self, spec: ModelSpec, config: InstanceConfig, most: StepLimits) -> InstanceConfig:
        """See ``Backend``."""
        # What the kernels refuse, and a lack of kernels, shows before minutes of loading.
        if config.attention == "flashinfer":
            raise ConfigError("--attention-backend flashinfer needs --device cuda")
        c_model(spec, 0, config.block_size)
        library()
        return config

    def buffer_bytes(self, spec: ModelSpec, limits: StepLimits) -> int:
        """See ``Backend``."""
        return limits.buffer_bytes(spec)

    def loader(
        self, reader: Reader, spec: ModelSpec, memory: Memory, weights: ModelWeights
    ) -> Loader:
        """See ``Backend``."""
        return cpu_loader(reader, spec, memory.shards[0])

    def decoder(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        memory: Memory,
        config: InstanceConfig,
    ) -> StepDecoder:
        """See ``Backend``."""
        at = memory.shards[0].kv_base_address
        return Decoder(spec, weights, at, config.block_size, config.num_threads)

    def sampler(self, eos_ids: Sequence[int], vocab_size: int, forms: Forms) -> Sampler:
        """See ``Backend``."""
        return Sampler(eos_ids, vocab_size, forms)

    def mark(self) -> Wait:
        """The kernels have ended when they return."""
        return nothing_to_wait_for
