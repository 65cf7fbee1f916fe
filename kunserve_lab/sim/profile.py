"""What one simulated instance is: its memory, and how long its steps take."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kunserve.core.errors import ConfigError, TooLittleMemory
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Handover, Message, Submit
from kunserve.core.place import ONE_HOST, Place
from kunserve.core.snapshots import InstanceSpec
from kunserve.core.step import Chunk
from kunserve_lab.sim.devices import Device
from kunserve_lab.sim.models import SimModel

GPU_GRANULE_BYTES = 64 << 20
TOKEN_BYTES = 4.3
"""Of a token's id in a message, on average over a vocabulary of 150,000."""


class StepTimes(Protocol):
    """How long a stage computes."""

    def stage_s(self, chunks: Sequence[Chunk], num_layers: int, is_last: bool) -> float:
        """Seconds for these chunks over so many layers, and the output head on the last stage."""
        ...


@dataclass(frozen=True, slots=True)
class InstanceProfile:
    """Everything that a simulated instance is made of."""

    model: SimModel
    spec: InstanceSpec
    """Of instance 0; the others differ in their number."""
    times: StepTimes
    """While the other instances compute."""
    num_gpus: int
    network_bytes_per_s: float
    """One way, for bulk and activations together."""
    host_bytes_per_s: float
    """From host memory, when layers are loaded from their copy there."""
    copy_bytes_per_s: float
    """Inside the instance."""
    remap_granule_s: float = 85e-6
    """Unmap, map and set access of one granule."""
    reads_during_steps: bool = True
    """Whether mail is read while a step computes: a GPU leaves its host free, a CPU does not."""
    message_latency_s: float = 100e-6
    """From one process to another."""
    codec_token_s: float = 0.1e-6
    """To encode and decode a token's id in a message: measured, 10 and 90 ns of one core."""
    hides_host_copies: bool = True
    """Whether copies to and from host memory run beside a step; else the step waits for them."""
    times_alone: StepTimes | None = None
    """While the others rest; None where instances do not share a machine."""

    def spec_of(self, instance_id: InstanceId, place: Place = ONE_HOST) -> InstanceSpec:
        """The make of one instance."""
        return replace(self.spec, instance_id=instance_id, place=place)

    def tokens_s(self, message: Message) -> float:
        """What the tokens in a message add to its latency: wire, encoding and decoding."""
        match message:
            case Handover(sequences=sequences):
                num_tokens = sum(
                    len(s.request.prompt_token_ids) + len(s.output_token_ids) for s in sequences
                )
            case Submit(request=request):
                num_tokens = len(request.prompt_token_ids)
            case _:
                return 0.0
        return num_tokens * (TOKEN_BYTES / self.network_bytes_per_s + self.codec_token_s)

    @property
    def pool_tokens(self) -> int:
        """Tokens of KV that an undropped instance holds."""
        return self.spec.blocks.tokens_in(self.spec.kv_units // self.spec.num_layers)

    @property
    def weight_share(self) -> float:
        """Of its memory, what whole weights take: the first thing that tells whether drops help."""
        return 1.0 - self.spec.kv_units * self.spec.unit_bytes / self.spec.memory_bytes

    @property
    def max_model_len(self) -> int:
        """The longest request: what the model and an undropped pool allow."""
        return min(self.model.max_model_len, self.pool_tokens)


class RooflineTimes:
    """Step times of GPUs under tensor (or expert) parallelism, as one logical device.

    Matrix products take the longer of their arithmetic and of reading the weights once; the
    attention of prompts is arithmetic, that of decodes reads KV (and computes, under MLA); two
    all-reduces per layer join the shards; the host adds its part per step and per sequence.

    Under expert parallelism every GPU sees every token and computes its own experts' part, so that
    the second all-reduce joins experts as it joins shards (vLLM's way without data parallelism).
    Experts are chosen alike, and no GPU has more to do than another.
    ``docs/decisions/simulator.md`` says what that leaves out.
    """

    def __init__(
        self, model: SimModel, device: Device, num_gpus: int, stage_host_share: float = 1.0
    ) -> None:
        """``stage_host_share``: of the host's part, what a stage before the last one pays."""
        self._stage_host_share = stage_host_share
        self._model = model
        self._windows = model.windows
        self._device = device
        self._num_gpus = num_gpus
        self._flops = num_gpus * device.peak_flops * device.matmul_share
        self._attention_flops = num_gpus * device.peak_flops * device.attention_share
        self._weight_rate = num_gpus * device.memory_bytes_per_s * device.weight_read_share
        self._kv_rate = num_gpus * device.memory_bytes_per_s * device.kv_read_share
        self._reduce_rate = device.peer_bytes_per_s * device.collective_share
        self._reduce_latency_s = device.collective_latency_s
        if num_gpus > device.gpus_per_server:
            # Rings use every card of a server at once, or servers reduce among themselves first.
            cards = device.gpus_per_server * device.network_bytes_per_s * device.network_share
            self._reduce_rate = min(self._reduce_rate, cards)
            self._reduce_latency_s += device.network_latency_s

    def joined(self, count: int) -> "RooflineTimes":
        """Those of so many times the GPUs."""
        num_gpus = self._num_gpus * count
        return RooflineTimes(self._model, self._device, num_gpus, self._stage_host_share)

    def stage_s(self, chunks: Sequence[Chunk], num_layers: int, is_last: bool) -> float:
        """See ``StepTimes``."""
        model, device = self._model, self._device
        windows = self._windows if self._windows.share else None
        num_tokens = num_sampled = 0
        decode_pairs: float = 0
        prefill_pairs: float = 0
        prefill_keys: float = 0
        for _, start, count, samples in chunks:
            num_tokens += count
            num_sampled += samples
            if count == 1:
                decode_pairs += start + 1
            else:
                prefill_pairs += count * start + count * (count + 1) // 2
                prefill_keys += start + count
            if windows is not None:
                hidden = windows.hidden_pairs(start, count)
                if count == 1:
                    decode_pairs -= hidden
                else:
                    prefill_pairs -= hidden
                    prefill_keys -= windows.hidden_keys(start)
        layer_s = self.matmul_s(num_tokens)
        layer_s += model.activation_width * model.dtype_bytes * num_tokens / self._weight_rate
        layer_s += max(
            prefill_pairs * model.prefill_pair_flops / self._attention_flops,
            prefill_keys * model.kv_token_bytes / self._kv_rate,
        )
        layer_s += max(
            decode_pairs * model.decode_pair_flops / self._attention_flops,
            decode_pairs * model.kv_token_bytes / self._kv_rate,
        )
        if self._num_gpus > 1:
            layer_s += 2.0 * self._reduce_s(num_tokens)
        total_s = num_layers * (layer_s + device.layer_overhead_s)
        host_s = device.step_overhead_s + device.sequence_overhead_s * len(chunks)
        if is_last:
            return total_s + self._head_s(num_sampled) + host_s
        return total_s + host_s * self._stage_host_share

    def matmul_s(self, num_tokens: int) -> float:
        """The matrix products of one layer."""
        return self.products_s(num_tokens, self._model.touched_bytes(num_tokens))

    def products_s(self, num_tokens: int, read_bytes: float) -> float:
        """The same where so many bytes of its weights are read."""
        return max(
            2.0 * self._model.token_params * num_tokens / self._flops,
            read_bytes / self._weight_rate,
        )

    def _reduce_s(self, num_tokens: int) -> float:
        model, num_gpus = self._model, self._num_gpus
        moved = 2.0 * (num_gpus - 1) / num_gpus * num_tokens * model.hidden_size * model.dtype_bytes
        return self._reduce_latency_s + moved / self._reduce_rate

    def _head_s(self, num_sampled: int) -> float:
        model = self._model
        flops = 2.0 * num_sampled * model.head_bytes / model.dtype_bytes
        return max(flops / self._flops, model.head_bytes / self._weight_rate)


def joined_profile(profile: InstanceProfile, count: int) -> InstanceProfile:
    """One instance of so many instances' GPUs, under tensor parallelism; one copy of the weights.

    Raises ConfigError for a CPU's: how its ranks share a step is not modelled.
    """
    times, spec = profile.times, profile.spec
    if not isinstance(times, RooflineTimes):
        raise ConfigError("instances of a measured profile cannot be joined: simulate GPUs")
    weights_bytes = spec.memory_bytes - spec.kv_units * spec.unit_bytes
    granule_bytes = spec.granule_bytes * count
    weights_bytes = -(-weights_bytes // granule_bytes) * granule_bytes
    kv_units = (spec.memory_bytes * count - weights_bytes) // spec.unit_bytes
    return replace(
        profile,
        spec=replace(
            spec,
            memory_bytes=weights_bytes + kv_units * spec.unit_bytes,
            kv_units=kv_units,
            granule_bytes=granule_bytes,
        ),
        times=times.joined(count),
        num_gpus=profile.num_gpus * count,
        network_bytes_per_s=profile.network_bytes_per_s * count,
        host_bytes_per_s=profile.host_bytes_per_s * count,
        copy_bytes_per_s=profile.copy_bytes_per_s * count,
    )


def gpu_profile(
    model: SimModel,
    device: Device,
    num_gpus: int | None = None,
    *,
    memory_utilization: float = 0.9,
    block_size: int = 64,
    stage_host_share: float = 1.0,
) -> InstanceProfile:
    """An instance of ``num_gpus`` GPUs; raises TooLittleMemory when the model does not fit.

    The weights count once: every GPU holds its shard. ``memory_utilization`` leaves room for
    activations and the runtime, as in vLLM.
    """
    gpus = model.default_num_gpus if num_gpus is None else num_gpus
    memory_bytes = int(gpus * device.memory_bytes * memory_utilization)
    unit_bytes = block_size * model.kv_token_bytes
    granule = gpus * GPU_GRANULE_BYTES
    weights = -(-model.weights_bytes // granule) * granule
    kv_units = (memory_bytes - weights) // unit_bytes
    if kv_units < model.num_layers and memory_bytes > weights:
        raise TooLittleMemory(
            f"{(memory_bytes - weights) / 1e9:.1f} GB beside the weights hold no block of "
            f"{block_size} tokens of {model.name}. Make blocks smaller or memory larger."
        )
    if kv_units < model.num_layers:
        raise TooLittleMemory(
            f"{model.name} needs {model.weights_bytes / 1e9:.0f} GB for its weights; an instance "
            f"of {gpus} x {device.name} has {memory_bytes / 1e9:.0f} GB "
            f"({memory_utilization:.0%} of its memory). Give it more GPUs."
        )
    spec = InstanceSpec(
        instance_id=InstanceId(0),
        num_layers=model.num_layers,
        block_size=block_size,
        unit_bytes=unit_bytes,
        layer_bytes=model.layer_bytes,
        memory_bytes=weights + kv_units * unit_bytes,
        kv_units=kv_units,
        granule_bytes=granule,
    )
    return InstanceProfile(
        model=model,
        spec=spec,
        times=RooflineTimes(model, device, gpus, stage_host_share),
        num_gpus=gpus,
        network_bytes_per_s=gpus * device.network_bytes_per_s * device.network_share,
        host_bytes_per_s=gpus * device.host_bytes_per_s,
        copy_bytes_per_s=gpus * device.memory_bytes_per_s * device.kv_read_share / 2,
    )
