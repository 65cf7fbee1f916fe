"""The demo needs nothing that a plain installation lacks."""

import subprocess
import sys

from kunserve.bench.demo import answer


def test_an_answer_comes_in_pieces(server) -> None:
    pieces = list(answer(server.url, "tiny", "What?"))
    assert sum(piece != "" for piece in pieces) == 32
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "What?"}]


def test_the_demo_does_without_the_openai_package() -> None:
    code = (
        "import sys; sys.modules['openai'] = None\n"
        "from kunserve.cli import main\n"
        "main(['demo', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--rounds" in done.stdout
