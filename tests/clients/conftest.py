"""A server for clients that may live in an environment of their own (``make test-clients``)."""

import os
import subprocess
import sys
from collections.abc import Generator

import pytest


@pytest.fixture(scope="session")
def url() -> Generator[str, None, None]:
    """The address of a parrot server, which runs in the environment of the server."""
    python = os.environ.get("SERVER_PYTHON", sys.executable)
    with subprocess.Popen(
        [python, "-m", "tests.clients.parrot_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        process.communicate(timeout=60)
    assert process.returncode == 0
