"""KunServe: LLM serving that drops replicated layers to survive memory overload."""

__version__ = "0.1.0"
