"""A network link of limited bandwidth, in front of a server on this machine."""

from __future__ import annotations

import socket
import socketserver
import threading
import time

CHUNK_BYTES = 64 << 10


class Link:
    """Forwards TCP connections to `server` (host, port). What comes back shares `mbit` million bits a second; what is sent
    there is not slowed down. `with` starts and ends it."""

    def __init__(self, server: tuple[str, int], mbit: float) -> None:
        self._bytes_per_s = mbit * 1e6 / 8
        self._lock, self._free_at = threading.Lock(), 0.0
        link = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection(server) as upstream:
                    up = threading.Thread(target=_pump, args=(self.request, upstream), daemon=True)
                    up.start()
                    while chunk := upstream.recv(CHUNK_BYTES):
                        link._take(len(chunk))
                        self.request.sendall(chunk)

        self._listener = _Listener(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._listener.server_address[1]}"

    def __enter__(self) -> Link:
        threading.Thread(target=self._listener.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown()
        self._listener.server_close()

    def _take(self, count: int) -> None:
        """Wait until the link has carried that many bytes, after those of all who came before."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self._bytes_per_s
            wait_s = self._free_at - time.monotonic()
        time.sleep(max(wait_s, 0.0))


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that close their connections in the middle of an answer are their own affair."""


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while chunk := source.recv(CHUNK_BYTES):
            target.sendall(chunk)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the other direction sees it as well
