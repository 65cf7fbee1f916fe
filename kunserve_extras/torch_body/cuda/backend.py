"""Device memory and torch: a GPU, or a stand-in for its driver with torch on the CPU."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kunserve.core.config import InstanceConfig
from kunserve.core.errors import ConfigError, TooLittleMemory
from kunserve.core.extras import find_extra
from kunserve.engine.backend import OneMemory, Wait, kv_in, nothing_to_wait_for
from kunserve.engine.cpu.decoder import StepDecoder, StepLimits
from kunserve.engine.cpu.hidden_rows import Hidden, HiddenRows
from kunserve.engine.cpu.split_head import Part
from kunserve.engine.host_kv import HostKv
from kunserve.engine.layer_weights import ModelWeights
from kunserve.engine.memory.memory import Memory
from kunserve.engine.memory.memory_plan import padding_granules
from kunserve.engine.memory.pages import OpenPages
from kunserve.engine.sampling.sampler import Sampler
from kunserve.engine.sampling.structured.forms import Forms
from kunserve.engine.weights.loader import WeightLoader
from kunserve.engine.weights.readers import Reader
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.cuda.cards import kept_by
from kunserve_extras.torch_body.cuda.driver import LIBRARY, Driver
from kunserve_extras.torch_body.cuda.host_kv import PinnedKv
from kunserve_extras.torch_body.cuda.pages import DevicePages
from kunserve_extras.torch_body.decoder import TorchDecoder
from kunserve_extras.torch_body.graphs import MIXED_ROWS, Recorder
from kunserve_extras.torch_body.histories import HISTORY_BYTES
from kunserve_extras.torch_body.hops.far import FarHops
from kunserve_extras.torch_body.hops.hops import Hops
from kunserve_extras.torch_body.hops.lanes import MOST_SLOT_BYTES, lane_bytes
from kunserve_extras.torch_body.hops.pipes import PipeBy
from kunserve_extras.torch_body.ops.expert_room import expert_bytes
from kunserve_extras.torch_body.ops.reference import ReferenceOps
from kunserve_extras.torch_body.ops.table import Ops, sums_bytes
from kunserve_extras.torch_body.quantised import pack_rows, weights_of
from kunserve_extras.torch_body.sampler import ROWS_AT_ONCE, ROWS_SORTED, TorchSampler
from kunserve_extras.torch_body.scratch import dense_size

logger = logging.getLogger(__name__)

_LARGEST_GRANULE_BYTES = 64 << 20
_GRANULES_PER_LAYER = 8
"""Larger granules save calls of the driver, smaller ones save what is left at a range's ends."""
_LIBRARIES_BYTES = 1 << 30
"""What the driver, torch, its libraries and recorded steps take of a device. Assumed."""
_NCCL_BYTES = 512 << 20
"""What NCCL takes of the device. Assumed."""
_LEAST_BLOCK_SIZE = 16
"""Block tables of recorded steps are assumed to have an entry for so many tokens."""
_LOOK_GAP_S = 100e-6
"""Between two looks while a device computes, for threads that move KV meanwhile."""
_DRAW_BYTES = 20
"""Of each logit of rows that are sampled at once: its weight, and copies for log-probabilities and
bans."""
_SORT_BYTES = 48
"""Of each logit of rows that are sorted: weights, their ids and running sums, and masks."""


_GATHER_BYTES = 16
"""Of each number of a row of a quantised embedding while it is widened."""


def _triton() -> Any:
    """What computes and records on a device. Triton comes with torch for CUDA, and only with it."""
    return find_extra("attention", "triton", "--device cuda")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


def drawing_bytes(spec: ModelSpec, limits: StepLimits) -> int:
    """What drawing takes of rows of so many logits, with histories for penalties of all of them."""
    at_once = min(limits.num_sampled, ROWS_AT_ONCE) * spec.vocab_size * _DRAW_BYTES
    sorting = min(limits.num_sampled, ROWS_SORTED) * spec.vocab_size * _SORT_BYTES
    return at_once + sorting + limits.num_sampled * limits.num_positions * HISTORY_BYTES


def _slot_bytes(spec: ModelSpec, limits: StepLimits) -> int:
    """For the hidden states of a step, if they are not too many to be sent so."""
    row_bytes = spec.hidden_size * spec.dtype_bytes
    return min(limits.num_tokens, MOST_SLOT_BYTES // row_bytes) * row_bytes


class CudaBackend(OneMemory):
    """One device of the driver, and torch on it."""

    pads_steps = True
    computes_aside = True
    splits_head = False
    has_panels = False
    rows_are_alike = False

    def __init__(
        self, device: torch.device, library: str = LIBRARY, recorder: Recorder | None = None
    ) -> None:
        """``device`` is torch's; the CPU where ``library`` stands in for libcuda.

        There ``recorder`` records steps; without one they are not recorded.
        """
        try:
            self._driver = Driver(device.index or 0, library)
        except OSError as error:
            raise ConfigError(f"no device {device}: {error.strerror or error}") from error
        if not self._driver.has_virtual_memory:
            raise ConfigError(f"{self._driver.name} cannot map memory at chosen addresses")
        self.device = device
        self.kept = kept_by(self._driver.capability)
        self.enter()
        self._recorder = recorder
        self._attention = "fused"
        """As settled."""
        self._left_bytes = self._driver.memory_bytes()[0]
        """Of the device, without what is planned to be taken."""
        self.open_pages: OpenPages = self._open_pages
        self._hops: Hops | FarHops | None = None
        self._takes_nccl = False
        self._slot_bytes, self._row_bytes = 0, 0

    def _open_pages(self, num_bytes: int, granule_bytes: int, beside_bytes: int) -> DevicePages:
        self._left_bytes -= num_bytes + beside_bytes
        return DevicePages(self._driver, num_bytes, granule_bytes, beside_bytes)

    def enter(self) -> None:
        """Let this thread use the device."""
        self._driver.enter()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def settle(self, spec: ModelSpec, config: InstanceConfig, most: StepLimits) -> InstanceConfig:
        """See ``Backend``. Granules that the device cannot have are replaced by its own size."""
        self._attention = config.attention
        self._takes_nccl = config.nccl_between_hosts
        self._row_bytes = spec.hidden_size * spec.dtype_bytes
        self._slot_bytes = _slot_bytes(spec, most)
        if config.attention == "flashinfer":
            self._flashinfer().check_flashinfer(spec)
        step = self._driver.granularity_bytes()
        if config.granule_bytes % step:
            wanted = min(_LARGEST_GRANULE_BYTES, spec.layer_bytes // _GRANULES_PER_LAYER)
            config = replace(config, granule_bytes=max(step, wanted // step * step))
        share = config.gpu_memory_utilization
        if share is None or config.kv_cache_memory_bytes is not None:
            return config
        free_bytes, total_bytes = self._driver.memory_bytes()
        libraries_bytes = _LIBRARIES_BYTES if self.device.type == "cuda" else 0
        wanted_bytes = int(total_bytes * share) - libraries_bytes
        if wanted_bytes > free_bytes:
            raise TooLittleMemory(
                f"{self._driver.name} has {_gib(free_bytes)} of {_gib(total_bytes)} left, and each "
                f"instance is to take {_gib(int(total_bytes * share))}: other processes use it "
                "(`nvidia-smi` names them). End them, or lower --gpu-memory-utilization"
            )
        padding_bytes = padding_granules(spec, config) * config.granule_bytes
        arena_bytes = wanted_bytes - self.buffer_bytes(spec, most) - padding_bytes
        return replace(config, memory_bytes=max(0, arena_bytes))

    def buffer_bytes(self, spec: ModelSpec, limits: StepLimits) -> int:
        """See ``Backend``.

        Beside what the CPU needs: gate and up apart, logits in the model's type, drawing, sums of
        attention, what experts make of tokens, what recorded steps read, and where hidden states
        come in.
        """
        gate_up = limits.num_tokens * 2 * dense_size(spec) * spec.dtype_bytes
        logits = limits.num_sampled * spec.vocab_size * spec.dtype_bytes
        drawing = drawing_bytes(spec, limits)
        if self._attention == "flashinfer":
            logits += self._flashinfer().WORKSPACE_BYTES
        row = spec.hidden_size * spec.dtype_bytes + limits.num_positions // _LEAST_BLOCK_SIZE * 4
        num_single, num_mixed = limits.most_single_tokens, min(limits.num_tokens, MIXED_ROWS[-1])
        steps = (num_single + num_mixed) * row + sums_bytes(spec, num_single)
        experts = expert_bytes(limits.num_tokens, spec)
        if spec.packed is not None and any(one.name == "embedding" for one in spec.packed.ends):
            steps += limits.num_tokens * spec.hidden_size * _GATHER_BYTES
        lane = _NCCL_BYTES if self._takes_nccl else lane_bytes(_slot_bytes(spec, limits), 1)
        return limits.buffer_bytes(spec) + gate_up + logits + drawing + steps + experts + lane

    def weights(self, memory: Memory, spec: ModelSpec) -> ModelWeights:
        """See ``Backend``."""
        return weights_of(super().weights(memory, spec))

    def loader(
        self, reader: Reader, spec: ModelSpec, memory: Memory, weights: ModelWeights
    ) -> WeightLoader:
        """See ``Backend``."""
        own = memory.shards[0]
        return WeightLoader(reader, own.layout, spec, weights, own.put_weights, pack_rows)

    def decoder(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        memory: Memory,
        config: InstanceConfig,
    ) -> StepDecoder:
        """See ``Backend``."""
        kv, ops = kv_in(memory.shards[0], self.device), self.open_ops(spec, config)
        recorder = self._open_recorder(config)
        return TorchDecoder(spec, weights, kv, config.block_size, ops, recorder)

    def _open_recorder(self, config: InstanceConfig) -> Recorder | None:
        """What records steps, if they are to be recorded: with our own kernels only."""
        if config.enforce_eager or config.attention != "fused":
            return None
        if self.device.type != "cuda":
            return self._recorder
        recorder: Recorder = _triton().TorchRecorder(self.device)
        return recorder

    def open_ops(self, spec: ModelSpec, config: InstanceConfig) -> Ops:
        """Triton's kernels on a device; plain torch where it has none."""
        ops: Ops = ReferenceOps(spec)
        if self.device.type == "cuda":
            ops = _triton().TritonOps(spec)
        if config.attention == "flashinfer":
            ops = self._flashinfer().FlashInferOps(spec, ops, self.device)
        return ops

    @staticmethod
    def _flashinfer() -> Any:
        return find_extra("attention", "flashinfer", "--attention-backend flashinfer")

    def sampler(self, eos_ids: Sequence[int], vocab_size: int, forms: Forms) -> Sampler:
        """See ``Backend``."""
        sampler = TorchSampler(eos_ids, vocab_size, forms, self.device)
        sampler.warm_up()  # the last that takes memory
        taken_bytes = self._left_bytes - self._driver.memory_bytes()[0]
        logger.info(
            "libraries and recorded steps took at most %.2f GiB of the device (what others took "
            "meanwhile is in it), %.2f with its context were assumed",
            taken_bytes / (1 << 30),
            _LIBRARIES_BYTES / (1 << 30),
        )
        return sampler

    def host_kv(self, memory: Memory, num_bytes: int | None) -> HostKv:
        """See ``Backend``. All of it is taken, and pinned, at once."""
        if not num_bytes:
            return super().host_kv(memory, num_bytes)
        began_s = time.perf_counter()
        try:
            pinned = PinnedKv(self._driver, memory.shards[0], num_bytes, self._begin_behind)
        except OSError as error:
            logger.warning(
                "%s of host memory cannot be pinned (%s): KV goes there between steps, and slowly",
                _gib(num_bytes),
                error.strerror,
            )
            return super().host_kv(memory, num_bytes)
        logger.info(
            "%s of host memory for KV pinned in %.1f s",
            _gib(num_bytes),
            time.perf_counter() - began_s,
        )
        return pinned

    def _begin_behind(self, stream: int) -> None:
        if self.device.type == "cuda":
            asked = torch.cuda.Event()  # type: ignore[no-untyped-call]
            asked.record()
            self._driver.begin_behind(asked.cuda_event, stream)

    @property
    def runs_ahead(self) -> bool:
        """See ``Backend``. FlashInfer's plans lie in memory that the step before may still read."""
        return self._attention == "fused"

    def open_hops(self, address: str) -> None:
        """See ``Backend``."""
        sizes = self._slot_bytes, self._row_bytes
        try:
            if address.startswith("tcp://"):
                by = PipeBy.NCCL if self.device.type == "cuda" else PipeBy.GLOO
                self._hops = FarHops(by, self.device, address, self._row_bytes)
            else:
                self._hops = self.ahead = Hops(self._driver, self.device, address, *sizes)
        except OSError as error:
            logger.info("hidden states go between stages as bytes: %s", error)

    def give(self, hidden: Hidden | Part, to: str) -> memoryview:
        """See ``Backend``."""
        assert isinstance(hidden, torch.Tensor), type(hidden)
        written = None if self._hops is None else self._hops.give(hidden, to)
        return written or super().give(hidden, to)

    def take(self, data: bytes | bytearray | memoryview, row_bytes: int) -> HiddenRows:
        """See ``Backend``."""
        landed = None if self._hops is None else self._hops.take(data)
        return landed or super().take(data, row_bytes)

    def mark(self) -> Wait:
        """See ``Backend``."""
        hops, wait = self._hops, self._mark()
        if not isinstance(hops, Hops) or not (reads := hops.reads.mark()):
            return wait

        def wait_and_tell(look_up: Callable[[], None] | None) -> None:
            wait(look_up)
            hops.reads.ended(reads)

        return wait_and_tell

    def _mark(self) -> Wait:
        if self.device.type != "cuda":
            return nothing_to_wait_for
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()

        def wait(look_up: Callable[[], None] | None) -> None:
            while look_up is not None and not done.query():
                look_up()
                time.sleep(_LOOK_GAP_S)
            done.synchronize()

        return wait
