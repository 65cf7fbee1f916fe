"""The backend of an instance, by its device and its ranks."""

from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.ids import InstanceId
from kunserve.engine.backend import Backend, CpuBackend
from kunserve.engine.ranks.backend import RankedBackend
from kunserve.engine.torch.cuda.opening import cards_of, open_card
from kunserve.model.source import ModelSource
from kunserve_extras.device_ranks.backend import DeviceRanksBackend


def open_backend(
    model: ModelConfig, source: ModelSource, config: InstanceConfig, instance_id: InstanceId
) -> Backend:
    """The backend of an instance; raises ConfigError where there is no such device.

    All ranks of all instances take the CUDA devices in turn.
    """
    num_ranks = config.tensor_parallel_size
    if config.device == "cpu":
        return CpuBackend() if num_ranks == 1 else RankedBackend(model, source, num_ranks)
    cards = cards_of(config.device, instance_id * num_ranks, num_ranks)
    own = open_card(cards[0])
    return own if num_ranks == 1 else DeviceRanksBackend(model, source, own, cards)
