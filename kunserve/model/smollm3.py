"""SmolLM3 is a Llama whose every fourth layer does not turn its heads: they know no positions."""

from pathlib import Path
from typing import Any

from kunserve.core.errors import ModelFiles, UnsupportedModel

SMOLLM3 = "SmolLM3ForCausalLM"
_INTERVAL = 4
"""As in ``transformers`` and llama.cpp, where files do not say another one."""


def unturned_layers(num_layers: int, interval: int = _INTERVAL) -> tuple[int, ...]:
    """Every so manieth layer."""
    return tuple(range(interval - 1, num_layers, interval))


def unturned_of_hf(path: Path, values: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """What ``config.json`` says of them."""
    if values.get("use_sliding_window"):
        raise UnsupportedModel(f"{path}: a sliding window of SmolLM3 is not supported")
    turned = values.get("no_rope_layers")
    if turned is None:
        interval = values.get("no_rope_layer_interval", _INTERVAL)
        if not isinstance(interval, int) or interval <= 0:
            raise ModelFiles(f"{path}: 'no_rope_layer_interval' is {interval!r}, no number")
        return unturned_layers(num_layers, interval)
    if not isinstance(turned, list) or len(turned) < num_layers or set(turned) - {0, 1}:
        raise ModelFiles(f"{path}: 'no_rope_layers' does not say 0 or 1 for {num_layers} layers")
    return tuple(layer for layer in range(num_layers) if not turned[layer])
