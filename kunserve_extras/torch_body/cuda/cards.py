"""What the front asks of the GPUs before it starts instances, without entering any."""

import importlib.metadata
import logging

from kunserve.core.config import MIB, KunServeConfig
from kunserve.core.errors import ConfigError, TooLittleMemory
from kunserve.core.plan import CardShare
from kunserve.engine.weights.layout import WeightLayout
from kunserve.model.packed import FP8_FORMATS, KEPT_ON_DEVICES, NOTHING_KEPT, Kept
from kunserve.model.sharding import spec_of_rank, spread_over_ranks
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.cuda.driver import LIBRARY, Card, CudaError, read_cards

logger = logging.getLogger(__name__)

STAND_IN = "stand-in:"
"""Before the path of a library in libcuda's place, for tests."""
_GRANULARITY_BYTES = 2 * MIB
_GIB = 1 << 30
_LEAST_CAPABILITY = {"bfloat16": (8, 0), "float16": (7, 0), "float32": (7, 0)}
"""From there on there are tensor cores for the type, or Triton's kernels at all."""

_HAS_FP8 = (8, 9)
"""From there on a device widens e4m3 by itself. Others have it expanded."""


def library_of(device: str) -> str | None:
    """The library of a device by its name; None for the CPU."""
    if device.startswith(STAND_IN):
        return device.removeprefix(STAND_IN)
    return None if device == "cpu" else LIBRARY


def auto_device(library: str = LIBRARY) -> str:
    """``cuda`` where GPUs can map memory, and torch is built for them; else ``cpu``."""
    if importlib.metadata.version("torch").endswith("+cpu"):
        return "cpu"
    try:
        cards = read_cards(library)
    except OSError:
        return "cpu"
    unable = [card.name for card in cards if not card.has_virtual_memory]
    if unable:
        logger.warning("--device auto takes the CPU: %s cannot map memory", ", ".join(unable))
    return "cuda" if cards and not unable else "cpu"


def find_cards(library: str) -> tuple[Card, ...]:
    """All cards, at least one; ConfigError says what is in the way."""
    try:
        cards = read_cards(library)
    except CudaError as error:
        raise ConfigError(f"--device cuda: the driver refuses: {error.strerror}") from error
    except OSError as error:
        raise ConfigError(f"--device cuda: no NVIDIA driver that can be used: {error}") from error
    if not cards:
        raise ConfigError("--device cuda: the driver finds no GPU")
    return cards


def check_card(card: Card, dtype: str) -> None:
    """Raise ConfigError for a card on which KunServe cannot run."""
    if not card.has_virtual_memory:
        raise ConfigError(
            f"{card.name} cannot map memory at chosen addresses, which drops need: use another "
            "GPU, or --device cpu"
        )
    least = _LEAST_CAPABILITY[dtype]
    if card.capability < least:
        have, need = (".".join(map(str, one)) for one in (card.capability, least))
        other = "; use --dtype float16" if card.capability >= _LEAST_CAPABILITY["float16"] else ""
        raise ConfigError(
            f"{dtype} needs a GPU of compute capability {need}; {card.name} has {have}{other}"
        )


def kept_by(capability: tuple[int, int]) -> Kept:
    """Which weights stay quantised on a device of that compute capability."""
    if capability >= _HAS_FP8:
        return KEPT_ON_DEVICES
    return KEPT_ON_DEVICES._replace(formats=KEPT_ON_DEVICES.formats - FP8_FORMATS)


def find_kept(config: KunServeConfig) -> Kept:
    """What all cards that instances may use keep quantised. Raises ConfigError without a card."""
    library = library_of(config.instance.device)
    if library is None:
        return NOTHING_KEPT
    used = _used(find_cards(library), config)
    return kept_by(min(card.capability for card in used))


def _used(cards: tuple[Card, ...], config: KunServeConfig) -> tuple[Card, ...]:
    """Those on which ranks of this server come to stand."""
    return cards[: _most_ranks(config)]


def _most_ranks(config: KunServeConfig) -> int:
    most = max(config.cluster.num_instances, config.cluster.max_instances or 0)
    return config.instance.tensor_parallel_size * most


def find_share(
    config: KunServeConfig, spec: ModelSpec, layer_bytes: float | None = None
) -> CardShare | None:
    """What each instance gets of the cards, where that is not told in bytes; None on the CPU.

    ``layer_bytes``: about what a layer's weights take, where they stay quantised. Raises
    ConfigError for what cannot run on these cards, before anything is started.
    """
    instance = config.instance
    library = library_of(instance.device)
    if library is None:
        return None
    cards = find_cards(library)
    num_ranks = instance.tensor_parallel_size
    used = _used(cards, config)
    for card in used:
        check_card(card, spec.dtype)
    on_each = -(-_most_ranks(config) // len(cards))
    if num_ranks > 1:
        spec = spec_of_rank(spread_over_ranks(spec, instance), num_ranks)
    weights_bytes = WeightLayout(spec, _GRANULARITY_BYTES).num_bytes
    if layer_bytes is not None:
        weights_bytes -= spec.num_layers * int(spec.layer_bytes - layer_bytes)
    _check_weights(used, spec, weights_bytes, on_each, num_ranks)
    utilization = instance.gpu_memory_utilization
    if utilization is None:
        return None
    share = utilization / on_each
    smallest_bytes = min(card.total_bytes for card in used)
    logger.info(
        "cards=%d first=%s ranks_on_each=%d memory_each=%.1fGiB",
        len(used),
        used[0].name,
        on_each,
        share * smallest_bytes / _GIB,
    )
    return CardShare(share, num_ranks * int(share * smallest_bytes))


def _check_weights(
    cards: tuple[Card, ...], spec: ModelSpec, weights_bytes: int, on_each: int, num_ranks: int
) -> None:
    """Raise TooLittleMemory where the weights alone are more than a card can hold.

    ``spec`` is a rank's.
    """
    part, holds, whose = "", "Each instance holds the whole model on one card", "instances"
    if num_ranks > 1:
        part, whose = f" on each of {num_ranks} ranks", "ranks"
        holds = "--tensor-parallel-size parts it too little"
    for card in cards:
        has = f"{card.name} has {card.total_bytes / _GIB:.1f} GiB"
        each = f"{spec.name} has {weights_bytes / _GIB:.1f} GiB of weights in {spec.dtype}{part}"
        if weights_bytes >= card.total_bytes:
            raise TooLittleMemory(
                f"{each}; {has}. {holds}, so this model cannot be served here: see "
                "--tensor-parallel-size"
            )
        if on_each * weights_bytes >= card.total_bytes:
            raise TooLittleMemory(
                f"{each}; {has} for {on_each} {whose}. Give fewer with --num-instances"
            )
