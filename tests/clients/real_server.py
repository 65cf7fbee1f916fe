"""The built-in model behind a whole server: ``python -m tests.clients.real_server``.

It prints its port, and ends when its standard input does.
"""

import sys

from kunserve_lab.bench.server_process import running_server


def main() -> None:
    """Serve until nobody wants it."""
    flags = ["smollm2-135m", "--num-instances", "1", "--instance-memory", "600MiB"]
    with running_server([*flags, "--chat-template", "chatml_tools"]) as server:
        print(server.url.rpartition(":")[2], flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
