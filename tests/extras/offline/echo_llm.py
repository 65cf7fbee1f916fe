"""``LLM`` over an ``EchoEngine``: everything but the instances."""

from typing import Any

from kunserve.core.config import KunServeConfig
from kunserve.model.generation_config import SamplingDefaults
from kunserve.server.start.launch import Launched
from kunserve_extras.offline import llm
from tests.unit.server.echo_engine import EchoEngine
from tests.unit.server.tiny_tokenizer import tiny_tokenizer


def echo_llm(
    monkeypatch, engine: EchoEngine, defaults: SamplingDefaults | None = None, **flags: Any
) -> llm.LLM:
    async def launch(config: KunServeConfig) -> Launched:
        return Launched(engine, tiny_tokenizer(), defaults or SamplingDefaults(), config)

    monkeypatch.setattr(llm, "launch", launch)
    return llm.LLM("tiny", num_instances=1, max_num_seqs=4, **flags)
