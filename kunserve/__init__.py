"""KunServe: LLM serving that drops replicated layers to survive memory overload."""

import importlib
from typing import Any

__version__ = "0.1.0"

_OFFLINE = {
    "LLM": "kunserve_extras.offline.llm",
    "CompletionOutput": "kunserve_extras.offline.outputs",
    "Logprob": "kunserve_extras.offline.outputs",
    "RequestOutput": "kunserve_extras.offline.outputs",
    "SamplingParams": "kunserve_extras.offline.sampling_params",
    "StructuredOutputsParams": "kunserve_extras.offline.sampling_params",
}
"""Public name -> module. Imported when it is asked for, so that ``import kunserve`` stays light."""
__all__ = [*_OFFLINE, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _OFFLINE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_OFFLINE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OFFLINE})
