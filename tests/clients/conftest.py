"""Servers for clients that may live in an environment of their own (``make test-clients``)."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Generator, Iterator

import pytest


@contextlib.contextmanager
def running(module: str) -> Iterator[str]:
    """The address of a server that a module runs, in the environment of the server."""
    python = os.environ.get("SERVER_PYTHON", sys.executable)
    with subprocess.Popen(
        [python, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.fixture(scope="session")
def url() -> Generator[str, None, None]:
    """Of a parrot."""
    with running("tests.clients.parrot_server") as found:
        yield found


@pytest.fixture(scope="session")
def real_url() -> Generator[str, None, None]:
    """Of the built-in model."""
    with running("tests.clients.real_server") as found:
        yield found
