"""Schemathesis asks what /openapi.json allows, and much that it does not (``make test-openapi``).

No answer is a 5xx. What operators do to a cluster is asked of a server that refuses it.
"""

import os
import subprocess
import sys
from collections.abc import Generator

import pytest

EXAMPLES = os.environ.get("EXAMPLES", "25")


@pytest.fixture(scope="module")
def url() -> Generator[str, None, None]:
    python = os.environ.get("SERVER_PYTHON", sys.executable)
    command = [python, "-m", "tests.openapi.echo_server"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_no_answer_is_a_5xx(url: str) -> None:
    pytest.importorskip("schemathesis")
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
        *("--checks", "not_a_server_error", "--phases", "coverage,fuzzing"),
        *("--max-examples", EXAMPLES, "--seed", "1", "--request-timeout", "60"),
    ]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stdout[-20_000:] + asked.stderr[-2_000:]
    assert "passed" in asked.stdout
