"""The demo needs nothing that a plain installation lacks."""

import subprocess
import sys

import pytest

from kunserve_lab.bench.session import ServerUnreachable
from kunserve_lab.compare.demo import answer


def test_an_answer_comes_in_pieces(server) -> None:
    pieces = list(answer(server.url, "tiny", "What?"))
    assert sum(piece != "" for piece in pieces) == 32
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "What?"}]


def test_an_answer_that_breaks_off_is_no_empty_one(server) -> None:
    server.behaviour.error_after = 0
    with pytest.raises(ServerUnreachable, match="engine died"):
        list(answer(server.url, "tiny", "What?"))
    server.behaviour.error_after = None
    server.behaviour.raw = b'data: {"choices": [{"delta": {"content": "The"}}]}\n\n'
    with pytest.raises(ServerUnreachable, match="ended early"):
        list(answer(server.url, "tiny", "What?"))


def test_the_demo_does_without_the_openai_package() -> None:
    code = (
        "import sys; sys.modules['openai'] = None\n"
        "from kunserve.cli import main\n"
        "main(['demo', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--rounds" in done.stdout
