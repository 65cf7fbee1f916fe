"""What every process that speaks HTTP makes for itself: a tokenizer, and whoever makes traces."""

import importlib
from typing import Any

from kunserve.core.config import KunServeConfig
from kunserve.core.extras import find_extra
from kunserve.model.source import ModelSource
from kunserve.server.api.chat_templates import read_chat_template
from kunserve.server.api.text import check_template
from kunserve.server.telemetry.request_life import Tracer


def tracer_of(config: KunServeConfig) -> Tracer | None:
    """Whoever makes traces; its packages are imported only when they are needed."""
    endpoint = config.log.otlp_traces_endpoint
    if endpoint is None:
        return None
    tracer: Tracer = find_extra("tracers", "otel", "--otlp-traces-endpoint")(endpoint)
    return tracer


def load_tokenizer(source: ModelSource, config: KunServeConfig) -> Any:
    """Called in a thread, while the instances start or are taken over.

    Importing the library takes as long as all other imports together. Raises ConfigError for a
    tokenizer or a chat template that does not do.
    """
    given = config.chat.chat_template
    template = None if given is None else read_chat_template(given)
    module = importlib.import_module("kunserve.model.tokenizer")
    loaded = module.load_tokenizer(source, config.model.tokenizer)
    if template is not None:
        loaded.chat_template = template
    check_template(loaded, template is not None, config.chat.enable_auto_tool_choice)
    return loaded
