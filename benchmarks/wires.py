"""What a message costs between two processes, over each kind of wire that could be used.

    python -m benchmarks.wires [--rounds 2]

Unix sockets are what clusters use; loopback TCP is what they used; CURVE is what TCP would need to
keep strangers out (see docs/decisions/transport.md). Kinds take turns, and the best round counts.
"""

import argparse
import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import zmq

from benchmarks.report import Report
from kunserve.transport.wire.socket_folder import SocketFolder
from kunserve.transport.wire.sockets import ANY_PORT, Socket

KINDS = ("Unix socket", "TCP", "TCP with CURVE")
SIZES = (200, 20_000, 1 << 20)
WINDOW = 64
"""Messages one way before the other side is waited for."""
Keys = tuple[bytes, bytes]


def reply(control: Connection, address: str, keys: Keys | None) -> None:
    """The other process: echoes, takes in, or acknowledges, as the first byte says."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.linger = 0
    if keys is not None:
        socket.curve_publickey, socket.curve_secretkey = keys
        socket.curve_server = True
    socket.bind(address)
    control.send(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    while True:
        route, frame = socket.recv_multipart(copy=False)
        match bytes(frame.buffer[:1]):
            case b"e":
                socket.send_multipart([route, frame], copy=False)
            case b"a":
                socket.send_multipart([route, str(time.process_time()).encode()])
            case b"q":
                return


def connect(address: str, server_key: bytes | None) -> Socket:
    """The measuring end."""
    socket: Socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    if server_key is not None:
        socket.curve_serverkey = server_key
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(address)
    return socket


def measure(kind: str, folder: SocketFolder, size: int) -> tuple[float, float, float]:
    """Seconds of a round trip and of a message one way, and the processor time of the latter."""
    keys = zmq.curve_keypair() if kind == "TCP with CURVE" else None
    address = folder.address(os.urandom(4).hex()) if kind == "Unix socket" else ANY_PORT
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=reply, args=(theirs, address, keys), daemon=True
    )
    process.start()
    socket = connect(ours.recv(), None if keys is None else keys[0])
    count = max(100, min(3000, 75_000_000 // size))
    echo, take, acknowledge = (letter + bytes(size - 1) for letter in (b"e", b"t", b"a"))

    def settle() -> float:
        socket.send(acknowledge[:1])
        return float(socket.recv()) + time.process_time()

    socket.send(echo)
    socket.recv()
    began_s = time.perf_counter()
    for _ in range(count):
        socket.send(echo, copy=False)
        socket.recv(copy=False)
    round_trip_s = (time.perf_counter() - began_s) / count
    cpu_s, began_s = settle(), time.perf_counter()
    for number in range(count):
        socket.send(take, copy=False)
        if number % WINDOW == WINDOW - 1:
            settle()
    cpu_s = settle() - cpu_s
    one_way_s = (time.perf_counter() - began_s) / count
    socket.send(b"q")
    process.join(10.0)
    socket.close()
    return round_trip_s, one_way_s, cpu_s / count


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    folder = SocketFolder()
    try:
        with Report("wires", rounds=rounds) as report:
            for size in SIZES:
                found = [[measure(kind, folder, size) for kind in KINDS] for _ in range(rounds)]
                for kind, results in zip(KINDS, zip(*found, strict=True), strict=True):
                    best = [min(values) * 1e6 for values in zip(*results, strict=True)]
                    for name, value in zip(("round trip", "one way", "CPU"), best, strict=True):
                        report.add(name, value, "us", message_bytes=size, wire=kind)
    finally:
        folder.remove()


if __name__ == "__main__":
    main()
