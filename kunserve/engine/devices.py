"""The backend of an instance, by its device and its ranks."""

from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.extras import find_extra
from kunserve.core.ids import InstanceId
from kunserve.engine.backend import Backend, CpuBackend
from kunserve.engine.memory.weights_file import SharedWeights
from kunserve.model.source import ModelSource


def open_backend(
    model: ModelConfig,
    source: ModelSource,
    config: InstanceConfig,
    instance_id: InstanceId,
    shared: SharedWeights | None = None,
) -> Backend:
    """The backend of an instance; raises ConfigError where there is no such device.

    All ranks of all instances take the CUDA devices in turn. ``shared``: on CPUs, the files of
    weights that the instance shares with others.
    """
    num_ranks = config.tensor_parallel_size
    if config.engine != "own":
        theirs: Backend = find_extra("engines", config.engine, f"--engine {config.engine}")(config)
        return theirs
    if config.device == "cpu" and num_ranks == 1:
        return CpuBackend(shared)
    backend: Backend
    if config.device == "cpu":
        backend = find_extra("ranks", "processes", "--tensor-parallel-size")(
            model, source, num_ranks, shared=shared
        )
        return backend
    devices = find_extra("devices", "cuda", f"--device {config.device}")
    cards = devices.cards_of(config.device, instance_id * num_ranks, num_ranks)
    own: Backend = devices.open_card(cards[0])
    if num_ranks == 1:
        return own
    of_ranks = find_extra("ranks", "devices", "--tensor-parallel-size beside --device cuda")
    backend = of_ranks.backend(model, source, own, cards)
    return backend
