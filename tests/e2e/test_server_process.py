"""Servers that comparisons start themselves do not outlive them."""

import socket
import subprocess
import sys

import pytest

_HOLD = """
import sys, time
from kunserve.bench.server_process import running_server
with running_server(sys.argv[1:]) as server:
    print(server.url, flush=True)
    time.sleep(600)
"""


def test_a_comparison_that_is_terminated_stops_its_server() -> None:
    flags = ["smollm2-135m", "--load-format", "dummy", "--instance-memory", "600MiB"]
    command = [sys.executable, "-c", _HOLD, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        host, port = holder.stdout.readline().strip().removeprefix("http://").split(":")
        socket.create_connection((host, int(port)), timeout=5.0).close()
        holder.terminate()
        assert holder.wait(60.0) == 143
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5.0)
