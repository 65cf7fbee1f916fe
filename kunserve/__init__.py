"""KunServe: LLM serving that drops replicated layers to survive memory overload."""

from typing import Any

__version__ = "0.1.0"

_OFFLINE = (
    "LLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
)
"""The library without a server. Imported when it is asked for, so that ``import kunserve`` stays
light."""
__all__ = [*_OFFLINE, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _OFFLINE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kunserve.core.extras import find_extra

    return getattr(find_extra("library", "offline", f"kunserve.{name}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OFFLINE})
