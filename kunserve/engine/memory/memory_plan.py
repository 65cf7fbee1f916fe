"""How an instance's memory is divided into weights and KV."""

from dataclasses import dataclass

from kunserve.core.config import MIB, InstanceConfig
from kunserve.core.errors import TooLittleMemory
from kunserve.engine.weights.layout import WeightLayout
from kunserve.model.sharding import config_of_rank, spec_of_rank, spread_over_ranks
from kunserve.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How an instance's budget is divided while it holds every layer."""

    num_granules: int
    weights_granules: int
    """Where the weights are shared: its part of them. They are not in the instance's own memory."""
    kv_units: int

    @classmethod
    def of(cls, model: ModelSpec, config: InstanceConfig) -> "MemoryPlan":
        """Divide the budget; raises TooLittleMemory when not even one block fits.

        Of an instance of several ranks: that of each, because all are alike.
        """
        num_ranks = config.tensor_parallel_size
        if num_ranks > 1:
            model = spec_of_rank(spread_over_ranks(model, config), num_ranks)
            config = config_of_rank(config)
        granule = config.granule_bytes
        unit = model.unit_bytes(config.block_size)
        weights = -(-WeightLayout(model, granule).num_granules // max(1, config.weight_sharers))
        if config.kv_cache_memory_bytes is None:
            num_granules = config.memory_bytes // granule
        else:
            num_granules = weights + -(-config.kv_cache_memory_bytes // granule)
        plan = cls(num_granules, weights, max(0, num_granules - weights) * granule // unit)
        if config.weight_sharers and not config.bears_weights:
            plan = cls(num_granules - weights, 0, plan.kv_units)
        if plan.kv_units < model.num_layers:
            block = model.block_bytes(config.block_size)
            is_share = config.gpu_memory_utilization is not None
            flag = "--gpu-memory-utilization" if is_share else "--instance-memory"
            needed = (weights + -(-block // granule)) * granule
            whose = "instance" if num_ranks == 1 else f"rank of an instance of {num_ranks}"
            raise TooLittleMemory(
                f"{model.name} needs at least {mib(needed)} per {whose}: "
                f"{mib(weights * granule)} of weights in {model.dtype} and {mib(block)} for one "
                f"KV block of {config.block_size} tokens; the {whose.partition(' ')[0]} has "
                f"{mib(num_granules * granule)}, so the longest request that would fit has 0 "
                f"tokens. Give more with {flag}"
            )
        return plan


def padding_granules(model: ModelSpec, config: InstanceConfig) -> int:
    """Granules that hold a unit for each layer below unit 0."""
    unit = model.unit_bytes(config.block_size)
    return -(-model.num_layers * unit // config.granule_bytes)


def mib(num_bytes: int) -> str:
    """For people."""
    return f"{num_bytes / MIB:.1f} MiB"
