"""Following a run on a cluster, against a stand-in for the API server: what it must survive happens between two calls, and
a real one cannot be told when."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from colchis.components.errors import BadData
from colchis.workflows.cluster import COMPLETED_LABEL, Cluster
from colchis.workflows.cluster_commands import follow

Json = dict[str, Any]


class ApiServer:
    """Answers a list with the Workflows that exist, and a watch with `watched`, which it keeps open, or `cut`s off."""

    def __init__(self) -> None:
        self.workflows: list[Json] = []
        self.watched: Callable[[], list[Json]] = list
        self.cut = False
        self.over = threading.Event()


def workflow(name: str, phase: str) -> Json:
    labels = {COMPLETED_LABEL: "true"} if phase != "Running" else {}
    metadata = {"name": name, "creationTimestamp": "2026-01-01T00:00:00Z", "labels": labels}
    return {"metadata": metadata, "status": {"phase": phase}}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    server = ApiServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            watch = "watch" in parse_qs(urlsplit(self.path).query)
            lines = server.watched() if watch else [{"items": server.workflows}]
            body = "".join(json.dumps(line) + "\n" for line in lines).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(body), body))
            if watch and server.cut:
                self.close_connection = True
                return
            if watch:
                server.over.wait(60)
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: Any) -> None:
            """Nothing to standard error."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.block_on_close = False  # the client keeps its connections
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{http.server_port}"
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "c", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(kubeconfig))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    yield server
    server.over.set()
    http.shutdown()
    http.server_close()
    thread.join()


def phases(cluster: Cluster) -> list[str]:
    return [change.phase for change in cluster.follow("sums")]


@pytest.mark.timeout(20)
def test_a_workflow_that_ends_between_list_and_watch_is_not_waited_for(api: ApiServer) -> None:
    """Fault: a watch whose first event says that all is over, and which then waits for minutes for another one."""
    api.workflows = [workflow("sums-1", "Running")]

    def watched() -> list[Json]:
        api.workflows = [workflow("sums-1", "Succeeded")]
        return [{"type": "ADDED", "object": api.workflows[0]}]

    api.watched = watched
    assert phases(Cluster("colchis")) == ["Running", "Succeeded"]


@pytest.mark.timeout(20)
def test_a_lost_connection_is_opened_anew(api: ApiServer) -> None:
    """Fault: a run that goes on, reported as a cluster that is gone."""
    api.workflows, api.cut = [workflow("sums-1", "Running")], True

    def watched() -> list[Json]:
        api.workflows = [workflow("sums-1", "Failed")]
        return [{"type": "ADDED", "object": workflow("sums-1", "Running")}]

    api.watched = watched
    assert phases(Cluster("colchis")) == ["Running", "Failed"]


@pytest.mark.timeout(20)
def test_a_workflow_deleted_while_it_is_followed_is_an_error(api: ApiServer) -> None:
    """Fault: a traceback, or waiting for what will never end."""
    api.workflows = [workflow("sums-1", "Running")]

    def watched() -> list[Json]:
        api.workflows = []
        return [{"type": "DELETED", "object": workflow("sums-1", "Running")}]

    api.watched = watched
    with pytest.raises(BadData, match="deleted"):
        follow("sums", "colchis", None, as_json=True)
