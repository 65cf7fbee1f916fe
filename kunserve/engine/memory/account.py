"""What an instance has once its model is loaded, for people."""

from dataclasses import dataclass

from kunserve.core.errors import TooLittleMemory
from kunserve.core.kv_blocks import KvBlocks
from kunserve.core.snapshots import InstanceSpec
from kunserve.engine.memory.free_memory import anonymous_bytes
from kunserve.engine.memory.memory import Memory
from kunserve.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class StartupAccount:
    """What an instance has once its model is loaded."""

    memory_bytes: int
    weights_bytes: int
    """Granules that hold weights."""
    huge_bytes: int
    """Of the memory, in huge pages of the host."""
    kv_bytes: int
    kv_units: int
    kv_blocks: int
    """Blocks of all layers."""
    longest_request_tokens: int
    """Prompt plus output of the largest request that fits, and that the model allows."""
    unseen_share: float
    """Of that request's KV, what lies before the windows of its layers, and is kept anyway."""
    longest_request_blocks: int
    whole_request_blocks: int
    """What it would take if KV of layers with a window were kept whole."""
    buffer_bytes: int
    """Beside that memory: activations, logits and positions of the largest step."""
    process_bytes: int
    """All of it, with interpreter and libraries."""
    load_s: float
    shares_weights: bool = False
    """Whether others have them too; of the memory they are a part only."""

    def __str__(self) -> str:
        """One line for the log."""
        mib = 1 << 20
        unseen = ""
        if self.longest_request_blocks < self.whole_request_blocks:
            times = self.whole_request_blocks / self.longest_request_blocks
            unseen = (
                f" in {self.longest_request_blocks} blocks, whole they would be "
                f"{self.whole_request_blocks}, so {times:.1f} times as many such requests fit"
            )
        elif self.unseen_share:
            unseen = f", {self.unseen_share:.0%} of its KV outside the windows of layers"
        in_huge = ""
        if self.huge_bytes:
            in_huge = f" ({self.huge_bytes / mib:.0f} in pages of 2 MiB so far)"
        return (
            f"memory {self.memory_bytes / mib:.1f} MiB{in_huge}: "
            f"weights {self.weights_bytes / mib:.1f} MiB{' shared' * self.shares_weights}, "
            f"KV {self.kv_bytes / mib:.1f} MiB in {self.kv_blocks} blocks; "
            f"beside it {self.buffer_bytes / mib:.1f} MiB for steps, "
            f"{self.process_bytes / mib:.1f} MiB in all; "
            f"longest request {self.longest_request_tokens} tokens{unseen}; "
            f"loaded in {self.load_s:.2f} s"
        )


def account_of(
    memory: Memory,
    spec: InstanceSpec,
    model: ModelSpec,
    buffer_bytes: int,
    other_bytes: int,
    load_s: float,
) -> StartupAccount:
    """What an instance with this memory has; ``other_bytes`` are those of its other processes."""
    blocks = spec.blocks_when_holding(spec.num_layers)
    longest = min(model.max_position, spec.blocks.tokens_in(blocks))
    return StartupAccount(
        memory_bytes=spec.memory_bytes,
        weights_bytes=spec.tensor_parallel_size * memory.shards[0].weights_bytes,
        huge_bytes=sum(shard.huge_bytes for shard in memory.shards),
        kv_bytes=spec.kv_units * spec.unit_bytes,
        kv_units=spec.kv_units,
        kv_blocks=blocks,
        longest_request_tokens=longest,
        unseen_share=model.unseen_share(max(1, longest)),
        longest_request_blocks=spec.blocks.holding(longest),
        whole_request_blocks=KvBlocks(spec.block_size).holding(longest),
        buffer_bytes=buffer_bytes,
        process_bytes=spec.memory_bytes + anonymous_bytes() + other_bytes,
        load_s=load_s,
        shares_weights=bool(spec.shared_weights_bytes),
    )


def check_length(model: ModelSpec, spec: InstanceSpec, max_model_len: int | None) -> None:
    """Refuse a promised length that one instance's undropped KV memory cannot hold."""
    if max_model_len is None:
        return
    fits = spec.blocks.tokens_in(spec.blocks_when_holding(spec.num_layers))
    if max_model_len <= fits:
        return
    needed = spec.blocks.holding(max_model_len) * model.num_layers * spec.unit_bytes
    raise TooLittleMemory(
        f"a request of {max_model_len} tokens (--max-model-len) needs {needed / (1 << 20):.1f} MiB "
        f"of KV memory; the instance has {spec.kv_units * spec.unit_bytes / (1 << 20):.1f} MiB, so "
        f"the longest request that would fit has {fits} tokens. Give more with --instance-memory "
        f"or lower --max-model-len"
    )
