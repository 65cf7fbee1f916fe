"""How large steps can be, so that their memory is taken at the start."""

from dataclasses import replace

from kunserve.core.config import InstanceConfig, ModelConfig, SchedulerConfig
from kunserve.core.kv_blocks import KvBlocks, KvRing
from kunserve.engine.cpu.decoder import LOGIT_ROWS, StepLimits
from kunserve.engine.memory.memory_plan import MemoryPlan
from kunserve.model.spec import ModelSpec


def most_of_any_step(
    spec: ModelSpec, model: ModelConfig, scheduler: SchedulerConfig | None
) -> StepLimits:
    """The largest step that the scheduler may form, whatever memory there is."""
    if scheduler is None:
        return StepLimits(0, 0, 0)
    num_tokens = scheduler.max_num_batched_tokens
    return StepLimits(
        num_tokens=num_tokens,
        num_sampled=min(num_tokens, max(scheduler.max_num_seqs, LOGIT_ROWS)),
        num_positions=model.max_model_len or spec.max_position,
        num_seqs=scheduler.max_num_seqs,
    )


def step_limits(
    spec: ModelSpec, instance: InstanceConfig, ring: KvRing | None, most: StepLimits
) -> StepLimits:
    """The same, of requests that fit."""
    num_blocks = MemoryPlan.of(spec, instance).kv_units // spec.num_layers
    fits = KvBlocks(instance.block_size, ring).tokens_in(num_blocks)
    return replace(most, num_positions=min(most.num_positions, fits))
