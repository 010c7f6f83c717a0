"""Faults from outside: a proxy on loopback between a client and a real server, and a store that breaks its promises.

    with FaultProxy(("127.0.0.1", 8333)) as proxy:
        proxy.add(Fault("PUT", "/commit.json", "swallow"))     # the server does it, the client never hears
        client = Store(replace(settings, endpoint=proxy.url))

A fault applies to the next `times` requests whose method and path match; `proxy.seen` is the log of all requests.
"""

from __future__ import annotations

import hashlib
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal

Action = Literal["reset", "delay", "status", "swallow", "truncate", "corrupt", "cut", "rewrite"]
BLOCK_BYTES = 64 << 10


@dataclass
class Fault:
    """What happens to requests that match.

    `reset`: the connection is reset before the server sees anything. `delay`: forwarded after `seconds`.
    `status`: answered with `status` and an S3 error body, not forwarded. `swallow`: forwarded, the reply is thrown away
    and the connection reset. `truncate`: the first half of the reply's body, then a reset. `corrupt`: one bit of the
    reply's body is flipped. `cut`: the server gets the first half of the request's body, then the connection is reset.
    `rewrite`: the server gets the request's body with `rewriting` done in it.
    """

    method: str
    """`*` is any."""
    path: str
    """Regular expression, searched in path and query."""
    action: Action
    times: int = 1
    """How many requests it applies to."""
    until_s: float | None = None
    """Applies for so long after it was added, however many requests, instead of `times`."""
    seconds: float = 0.0
    status: int = 503
    code: str = "SlowDown"
    body: str | None = None
    """Regular expression, searched in the request's body as well."""
    rewriting: tuple[bytes, bytes] = (b"", b"")
    """What the body must contain, and what stands there instead."""
    before: Callable[[], None] | None = None
    """Called when it applies, e.g. to change something in the server first; a `cut` calls it after the first half."""
    after: Callable[[], None] | None = None
    """Called when the server has answered, before the reply goes on."""
    added_s: float = field(default_factory=time.monotonic)
    applied: int = 0
    struck: threading.Event = field(default_factory=threading.Event)
    """Set when it has applied for the first time, `before` and `after` included."""


class FaultProxy:
    """An HTTP/1.1 proxy for one server. Threads; `with` starts and ends it."""

    def __init__(self, server: tuple[str, int]) -> None:
        self.server = server
        self.seen: list[tuple[str, str]] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._listener = _Listener(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._listener.server_address[1]}"
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.02,), daemon=True)

    def add(self, fault: Fault) -> Fault:
        with self._lock:
            fault.added_s = time.monotonic()
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()

    def count(self, method: str, path: str) -> int:
        """How many requests of this method matched `path`."""
        return sum(1 for m, p in self.seen if m == method and re.search(path, p))

    def match(self, method: str, path: str, body: Callable[[], bytes]) -> Fault | None:
        with self._lock:
            self.seen.append((method, path))
            for fault in self._faults:
                if fault.method not in (method, "*") or not re.search(fault.path, path):
                    continue
                if fault.body is not None and not re.search(fault.body.encode(), body()):
                    continue
                if fault.until_s is not None:
                    if time.monotonic() - fault.added_s >= fault.until_s:
                        continue
                elif fault.applied >= fault.times:
                    continue
                fault.applied += 1
                return fault
        return None

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown()
        self._listener.server_close()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Broken connections are what this is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a head and a body in two writes would wait 40 ms for each other
    owner: FaultProxy

    def _serve(self) -> None:
        self._read: bytes | None = None
        fault = self.owner.match(self.command, self.path, self._body)
        try:
            self._forward(fault)
        finally:
            if fault:
                fault.struck.set()

    def _forward(self, fault: Fault | None) -> None:
        if fault and fault.before and fault.action != "cut":
            fault.before()
        if fault and fault.action == "reset":
            return self._reset()
        body = self._body()
        if fault and fault.action == "status":
            text = f"<Error><Code>{fault.code}</Code><Message>injected</Message></Error>".encode()
            self.send_response(fault.status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else text)
            return None
        if fault and fault.action == "delay":
            time.sleep(fault.seconds)
        if fault and fault.action == "rewrite":
            assert fault.rewriting[0] in body, f"{fault.rewriting[0]!r} is not in {body!r}"
            body = body.replace(*fault.rewriting)
        connection = HTTPConnection(*self.owner.server, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection", "transfer-encoding", "content-length"):
                    connection.putheader(name, value)
            if body or self.command in ("PUT", "POST"):
                connection.putheader("Content-Length", str(len(body)))
            if fault and fault.action == "cut":
                connection.endheaders(body[: len(body) // 2])
                if fault.before:
                    fault.before()
                return self._reset()
            connection.endheaders(body or None)
            return self._answer(connection.getresponse(), fault)
        except OSError:
            return self._reset()  # the server is down: so is the proxy
        finally:
            connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

    def _body(self) -> bytes:
        if self._read is None:
            self._read = self._read_body()
        return self._read

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            blocks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                blocks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(blocks)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, response: HTTPResponse, fault: Fault | None) -> None:
        body = response.read()
        if fault and fault.after:
            fault.after()
        if fault and fault.action == "swallow":
            return self._reset()
        length = response.getheader("Content-Length") if self.command == "HEAD" else str(len(body))
        if fault and fault.action == "corrupt" and body:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        self.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        if length is not None and response.status != 204:
            self.send_header("Content-Length", length)
        self.end_headers()
        if self.command == "HEAD":
            return None
        if fault and fault.action == "truncate":
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            return self._reset()
        self.wfile.write(body)
        return None

    def _reset(self) -> None:
        """Close with RST: SO_LINGER of 0 seconds."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.connection.close()

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: `seen` is the log."""


Promise = Literal["create", "create-race", "swap", "swap-race", "overwrite"]


class UnfitStore:
    """A small S3 (one bucket, no signatures) that keeps all its promises but `broken`.

    `create`: If-None-Match is ignored. `create-race`: checked, but not atomically. `swap`, `swap-race`: the
    same of If-Match.
    `overwrite`: a read may return what was there before. None: a fit store.
    """

    def __init__(self, broken: Promise | None) -> None:
        self.broken = broken
        self.objects: dict[str, bytes] = {}
        self.old: dict[str, bytes] = {}
        self.lock = threading.Lock()
        store = self

        class Handler(_UnfitHandler):
            owner = store

        self._listener = _Listener(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._listener.server_address[1]}"

    def __enter__(self) -> UnfitStore:
        threading.Thread(target=self._listener.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown()
        self._listener.server_close()


class _UnfitHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: UnfitStore

    def do_PUT(self) -> None:
        body, key, store = self.rfile.read(int(self.headers.get("Content-Length") or 0)), self.path, self.owner
        condition = "If-None-Match" if store.broken == "create-race" else "If-Match"
        racy = store.broken in ("create-race", "swap-race") and self.headers.get(condition) is not None
        with store.lock:
            found = store.objects.get(key)
        if racy:
            time.sleep(0.02)
        with store.lock:
            found = found if racy else store.objects.get(key)
            if self.headers.get("If-None-Match") and found is not None and store.broken != "create":
                return self._send(412, _error("PreconditionFailed"))
            wanted = self.headers.get("If-Match")
            if wanted and store.broken != "swap" and (found is None or wanted.strip('"') != _etag(found)):
                return self._send(412, _error("PreconditionFailed"))
            if found is not None:
                store.old[key] = found
            store.objects[key] = body
        return self._send(200, b"", etag=_etag(body))

    def do_GET(self) -> None:
        path, store = self.path.partition("?")[0], self.owner
        if "list-type" in self.path:
            return self._send(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
        with store.lock:
            data = store.objects.get(path)
            if store.broken == "overwrite":
                data = store.old.get(path, data)
        if data is None:
            return self._send(404, _error("NoSuchKey"))
        return self._send(200, data, etag=_etag(data))

    def do_DELETE(self) -> None:
        with self.owner.lock:
            self.owner.objects.pop(self.path, None)
        self._send(204, b"")

    def _send(self, status: int, body: bytes, *, etag: str | None = None) -> None:
        self.send_response(status)
        if etag:
            self.send_header("ETag", f'"{etag}"')
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


def _etag(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
