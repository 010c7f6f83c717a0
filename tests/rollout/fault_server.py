"""An engine that misbehaves on demand: a real HTTP server whose next answers follow a script.

A good answer is a function of input and seed alone, like a deterministic engine's: `seed`-dependent letters, then the
end-of-sequence token.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

EOS = 1
FIRST, LETTERS = 2, 50
MARK = "loaded-3-0a1b2c3d"
"""The label of a load that is not proven yet."""


def answer(ids: list[int], parameters: dict, version: str) -> dict:
    seed = parameters["sampling_seed"]
    length = min(parameters["max_new_tokens"], 1 + seed % 4)
    output = [FIRST + (seed // (i + 1)) % LETTERS for i in range(length - 1)] + [EOS]
    return {
        "text": "",
        "output_ids": output,
        "meta_info": {
            "id": "x",
            "finish_reason": {"type": "stop", "matched": EOS},
            "prompt_tokens": len(ids),
            "completion_tokens": len(output),
            "cached_tokens": 1,
            "weight_version": version,
            "output_token_logprobs": [[-0.5, i, None] for i in output],
        },
    }


class FaultServer:
    """`script`: faults of the next /generate requests, in order; then every answer is good."""

    def __init__(self, version: int | str = 3, script: tuple[str, ...] = (), always: str | None = None) -> None:
        self.version, self.always = str(version), always
        self.ready = True
        self.token = ""
        self.proven_at: float | None = None
        """By time.monotonic(): from then on MARK is proven, and before it an activation is under way. None: neither."""
        self.statuses = 0
        self.script = deque(script)
        self.requests: list[dict] = []
        self.running = self.most_running = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

            def do_GET(self) -> None:
                outer.status(self)

            def do_POST(self) -> None:
                outer.generate(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def __enter__(self) -> FaultServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()

    def status(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/model_info":
            return self.send(handler, 200, {"weight_version": self.version})
        if self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
            return self.send(handler, 401, {})
        version = int(self.version) if self.version.isdecimal() else None
        body = {"engine_url": self.url, "engine_id": f"engine-{self.url[-5:]}", "version": version, "ready": self.ready}
        over = self.proven_at is not None and time.monotonic() >= self.proven_at
        body["proven"] = {MARK: int(self.version)} if over else {}
        body["state"] = "serving" if over or self.proven_at is None else "activating"
        self.statuses += 1
        return self.send(handler, 200, body)

    def generate(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            self.requests.append(body)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            fault = self.script.popleft() if self.script else self.always
        try:
            self.misbehave(handler, body, fault)
        finally:
            with self._lock:
                self.running -= 1

    def misbehave(self, handler: BaseHTTPRequestHandler, body: dict, fault: str | None) -> None:
        good = [answer(ids, p, self.version) for ids, p in zip(body["input_ids"], body["sampling_params"], strict=True)]
        meta = good[0]["meta_info"]
        match fault:
            case None:
                pass
            case "500" | "503" | "400" | "401":
                return self.send(handler, int(fault), {"error": {"message": f"scripted {fault}"}})
            case "reset":
                linger = struct.pack("ii", 1, 0)
                handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                handler.close_connection = True
                return handler.connection.shutdown(socket.SHUT_RDWR)
            case "hang":
                self._stopped.wait(30)
                handler.close_connection = True
                return None
            case "dribble":
                handler.send_response(200)
                handler.send_header("Content-Length", "1000")
                handler.end_headers()
                with contextlib.suppress(OSError):
                    while not self._stopped.wait(0.1):
                        handler.wfile.write(b" ")
                        handler.wfile.flush()
                handler.close_connection = True
                return None
            case "slow":
                self._stopped.wait(0.2)
            case "not json":
                return self.send(handler, 200, None)
            case "short":
                good.pop()
            case "abort":
                meta["finish_reason"] = {"type": "abort", "message": "paused"}
            case "abort halfway" | "abort at the end" | "abort of another version" | "abort with nan":
                n = len(good[0]["output_ids"]) if fault == "abort at the end" else 1
                good[0]["output_ids"] = [FIRST] * n
                meta["output_token_logprobs"] = [[float("nan") if "nan" in fault else -0.25, FIRST, None]] * n
                meta["finish_reason"] = {"type": "abort", "message": "paused"}
                if "another version" in fault:
                    meta["weight_versions"] = [{"version": "2", "start": 0, "end": n}]
            case "wrong version":
                meta["weight_version"] = "2"
            case "changed version":
                n = len(good[0]["output_ids"])
                meta["weight_versions"] = [{"version": "2", "start": 0, "end": n}]
            case "mark":
                n = len(good[0]["output_ids"])
                meta["weight_versions"] = [
                    {"version": self.version, "start": 0, "end": 1},
                    {"version": MARK, "start": 1, "end": n},
                ]
                meta["weight_version"] = MARK
            case "two truths":
                n = len(good[0]["output_ids"])
                meta["weight_versions"] = [{"version": self.version, "start": 0, "end": n}]
                meta["weight_version"] = "2"
            case "half span":
                meta["weight_versions"] = [{"version": self.version, "start": 0, "end": len(good[0]["output_ids"]) + 1}]
            case "minus infinity":
                meta["output_token_logprobs"][0][0] = float("-inf")
            case "nan":
                meta["output_token_logprobs"][0][0] = float("nan")
            case "positive":
                meta["output_token_logprobs"][0][0] = 0.7
            case "other token":
                meta["output_token_logprobs"][0][1] += 1
            case "no logprobs":
                del meta["output_token_logprobs"]
            case "empty":
                good[0]["output_ids"], meta["output_token_logprobs"] = [], []
            case "too long":
                good[0]["output_ids"] = [2] * 99
                meta["output_token_logprobs"] = [[-0.5, 2, None]] * 99
            case _:
                raise AssertionError(fault)
        return self.send(handler, 200, good)

    def send(self, handler: BaseHTTPRequestHandler, status: int, body: object) -> None:
        data = b"<html>" if body is None else json.dumps(body).encode()
        with contextlib.suppress(OSError):
            handler.send_response(status)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)
