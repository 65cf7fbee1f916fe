"""A client that only opens connections: ``flood.py PORT COUNT``; prints how each was answered."""

import json
import resource
import selectors
import socket
import sys
import time


def main(port: int, count: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    selector = selectors.DefaultSelector()
    for _ in range(count):
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(("127.0.0.1", port))
        selector.register(connection, selectors.EVENT_READ)
    refused = served = 0
    deadline_s = time.monotonic() + 80.0
    while refused < count - 50 and time.monotonic() < deadline_s:
        for key, _ in selector.select(0.1):
            selector.unregister(key.fileobj)
            try:
                answer = key.fileobj.recv(100)
                refused += answer.startswith(b"HTTP/1.1 503")
                served += bool(answer) and not answer.startswith(b"HTTP/1.1 503")
            except ConnectionResetError:
                refused += 1
    print(json.dumps({"refused": refused, "served": served}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
