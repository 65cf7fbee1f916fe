"""What every process that speaks HTTP makes for itself: a tokenizer, and whoever makes traces."""

import importlib
from typing import Any

from kunserve.core.config import KunServeConfig
from kunserve.core.extras import find_extra
from kunserve.model.source import ModelSource
from kunserve.server.telemetry.request_life import Tracer


def tracer_of(config: KunServeConfig) -> Tracer | None:
    """Whoever makes traces; its packages are imported only when they are needed."""
    endpoint = config.log.otlp_traces_endpoint
    if endpoint is None:
        return None
    tracer: Tracer = find_extra("tracers", "otel", "--otlp-traces-endpoint")(endpoint)
    return tracer


def load_tokenizer(source: ModelSource, tokenizer: str | None, template: str | None) -> Any:
    """Called in a thread, while the instances start or are taken over. ``template`` replaces the
    tokenizer's own.

    Importing the library takes as long as all other imports together.
    """
    module = importlib.import_module("kunserve.model.tokenizer")
    loaded = module.load_tokenizer(source, tokenizer)
    if template is not None:
        loaded.chat_template = template
    return loaded
