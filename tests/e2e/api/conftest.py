"""The module's server as an engine's tests use it; a module gives it as its fixture ``shared``."""

from collections.abc import Generator

import openai
import pytest

from tests.unit.server.live_server import LiveServer


@pytest.fixture
def server(shared: LiveServer) -> LiveServer:
    """The module's server with an engine as new."""
    shared.renew_engine()
    return shared


@pytest.fixture
def client(server: LiveServer) -> Generator[openai.OpenAI, None, None]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60.0
    ) as one:
        yield one
