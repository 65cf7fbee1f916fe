"""A start that cannot end well ends before the weights are loaded."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

import kunserve.server.start.launch as launch
from kunserve.cluster.driver.local import LocalCluster
from kunserve.core.config import ChatConfig, KunServeConfig
from kunserve.core.errors import ConfigError

TOOLS = KunServeConfig(chat=ChatConfig(enable_auto_tool_choice=True, tool_call_parser="hermes"))


@pytest.mark.parametrize("loads", ["never", "at once"])
def test_a_template_without_tools_ends_a_start_whatever_the_instances_do(
    loads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []

    async def closed() -> None:
        ends.append("closed")

    async def start(*_: Any, **__: Any) -> Any:
        try:
            if loads == "never":
                await asyncio.Event().wait()
        finally:
            ends.append("started or cancelled")
        return SimpleNamespace(close=closed)

    monkeypatch.setattr(LocalCluster, "start", start)
    monkeypatch.setattr(launch, "find_or_build", lambda: SimpleNamespace(name="none"))

    async def run() -> None:
        with pytest.raises(ConfigError, match="does not tell the model of tools"):
            await asyncio.wait_for(launch.launch(TOOLS), 120)

    asyncio.run(run())
    assert ends == ["started or cancelled", *(["closed"] if loads == "at once" else [])]
