"""A git repository as a git host has it: bare, served over HTTP by git's own CGI program, and a clone to commit from."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.parser import BytesParser
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

AUTHOR = ("-c", "user.name=test", "-c", "user.email=test@example.com")


class Repository:
    """Branch `main` of a repository at `url`. What lies in `work` is what the next commit has."""

    def __init__(self, work: Path, url: str) -> None:
        self.work, self.url = work, url

    def commit(self, message: str) -> str:
        """Commits and pushes everything in `work`; the commit's name."""
        _git(self.work, "add", "--all", "--force")
        _git(self.work, *AUTHOR, "commit", "--quiet", "--message", message)
        _git(self.work, "push", "--quiet", "origin", "HEAD:main")
        return _git(self.work, "rev-parse", "HEAD").strip()


@contextmanager
def serve(folder: Path) -> Iterator[Repository]:
    """A new repository under `folder`, served on a free port of this host."""
    bare, work = folder / "served" / "colchis.git", folder / "work"
    bare.mkdir(parents=True)
    _git(bare, "init", "--quiet", "--bare", "--initial-branch=main")
    _git(folder, "clone", "--quiet", str(bare), str(work))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Backend, bare.parent))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Repository(work, f"http://127.0.0.1:{server.server_port}/{bare.name}")
    finally:
        server.shutdown()
        server.server_close()


class _Backend(BaseHTTPRequestHandler):
    """Gives each request to `git http-backend`; it only reads."""

    def __init__(self, root: Path, *connection: object) -> None:
        self.root = root
        super().__init__(*connection)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = {
            "GIT_PROJECT_ROOT": str(self.root),
            "GIT_HTTP_EXPORT_ALL": "yes",
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "REQUEST_METHOD": self.command,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
        }
        done = subprocess.run(
            ["git", "http-backend"], input=body, env={**os.environ, **request}, capture_output=True, check=True
        )
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        fields = BytesParser().parsebytes(head)
        self.send_response(int(fields.get("Status", "200").split()[0]))
        for name, value in fields.items():
            if name != "Status":
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: the source controller's log has what it asked for."""


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"git {' '.join(words)}: {done.stderr}")
    return done.stdout
