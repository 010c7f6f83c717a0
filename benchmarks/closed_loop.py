"""A load generator in a process of its own, so cheap that what is measured is the server.

Reads one order a line from standard input, {"port": P, "bodies": [...], "repeats": N}: one connection for each body, kept
open from order to order; each sends its body N times, the next as soon as the answer to the last is complete. Requests are
encoded before the clock starts and answers are parsed after it stops. Prints {"seconds", "cpu_s", "answers"} a line.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from typing import Any

HEADER_END = b"\r\n\r\n"
LENGTH = b"content-length:"
JSON = "Content-Type: application/json"
TIMEOUT_S = 120.0


class Connection:
    """One socket, one request at a time."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.request = b""
        self.left = 0
        self.received = b""
        self.replies: list[bytes] = []

    def prepare(self, body: Any, repeats: int) -> None:
        content = json.dumps(body).encode()
        lines = ("POST /generate HTTP/1.1", "Host: engine", f"Content-Length: {len(content)}", JSON, "", "")
        self.request, self.left, self.replies = "\r\n".join(lines).encode() + content, repeats, []

    def send(self) -> None:
        self.left -= 1
        self.socket.sendall(self.request)

    def take(self) -> bool:
        """Reads what is there; True when a whole answer is."""
        data = self.socket.recv(1 << 20)
        if not data:
            raise RuntimeError("the engine closed the connection")
        self.received += data
        head, found, content = self.received.partition(HEADER_END)
        if not found or len(content) < int(head.lower().partition(LENGTH)[2].partition(b"\r\n")[0]):
            return False
        self.replies.append(self.received)
        self.received = b""
        return True

    def answers(self) -> list[Any]:
        found = []
        for reply in self.replies:
            head, _, content = reply.partition(HEADER_END)
            if b" 200 " not in head.partition(b"\r\n")[0]:
                raise RuntimeError(f"/generate answered {reply[:300]!r}")
            found.append(json.loads(content))
        return found


def drive(connections: list[Connection]) -> None:
    """Until every connection has all its answers."""
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            connection.send()
        still_open = len(connections)
        while still_open:
            ready = selector.select(TIMEOUT_S)
            if not ready:
                raise TimeoutError(f"no answer within {TIMEOUT_S} s")
            for key, _ in ready:
                connection = key.data
                if connection.take():
                    if connection.left:
                        connection.send()
                    else:
                        still_open -= 1


def main() -> None:
    port, pool = 0, list[Connection]()
    for line in sys.stdin:
        order = json.loads(line)
        if order["port"] != port:
            port, pool = order["port"], []
        bodies = order["bodies"]
        pool += [Connection(port) for _ in range(len(bodies) - len(pool))]
        connections = pool[: len(bodies)]
        for connection, body in zip(connections, bodies, strict=True):
            connection.prepare(body, order["repeats"])
        cpu, started = time.process_time(), time.perf_counter()
        drive(connections)
        result = {"seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}
        result["answers"] = [answer for connection in connections for answer in connection.answers()]
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
