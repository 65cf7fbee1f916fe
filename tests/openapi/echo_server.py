"""A server until its input ends, which repeats prompts: ``python -m tests.openapi.echo_server``."""

import sys

from tests.clients.parrot_server import CHAT
from tests.unit.server.echo_engine import EchoEngine
from tests.unit.server.live_server import live_server


def main() -> None:
    """Print the port, and serve until nobody wants it."""
    with live_server(EchoEngine(), chat=CHAT) as server:
        print(server.port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
