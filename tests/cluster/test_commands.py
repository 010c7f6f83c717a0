"""The `colchis` command on a real cluster: submit, logs, diff, a request applied twice; and the Argo server's calls."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from colchis.components.records.run import Outcome
from colchis.components.store import Store, keys
from colchis.workflows.local.ports import free_port
from tests.cluster.client import Cluster
from tests.cluster.conftest import EXAMPLE, SMALL, wait_for
from tests.cluster.runs import colchis

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200), pytest.mark.usefixtures("strict")]

RUN = "second"
SETTINGS = [part for setting in (*SMALL, "loop.iterations=1") for part in ("--set", setting)]


@pytest.fixture(scope="module")
def submitted(pool: list[str]) -> list[dict[str, Any]]:
    """What `colchis submit --watch --json` said, line by line; the run has ended well."""
    done = colchis("submit", str(EXAMPLE), *SETTINGS, "--run", RUN, "--watch", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_submit_follows_a_run_to_its_end(submitted: list[dict[str, Any]]) -> None:
    """Fault: a watch that misses pods, or ends before the run."""
    first, *changes = submitted
    assert first["run"] == RUN
    ended = {c["node"].partition("(")[0] for c in changes if c["phase"] == "Succeeded"}
    assert {"begin", "rollout", "batch", "train", "reload: load", "close"} <= ended | {"close"}
    assert (changes[-1]["node"], changes[-1]["phase"]) == ("", "Succeeded")


def test_logs_are_those_of_the_stage(submitted: list[dict[str, Any]]) -> None:
    """Fault: a command that names pods without their lines, or mixes stages."""
    done = colchis("logs", RUN, "-n", "colchis", "--stage", "evaluate")
    assert done.returncode == 0, done.stderr
    assert '"evaluated"' in done.stdout


def test_the_run_is_read_like_one_on_this_machine(submitted: list[dict[str, Any]]) -> None:
    """Fault: records that only the place that wrote them can read."""
    done = colchis("status", RUN, "--json")
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert (status["closed"], status["serving"]["version"]) == (1, 1)


def test_a_template_that_is_not_installed_is_refused(cluster: Cluster) -> None:
    """Fault: a Workflow that waits for ever, or fails where nobody looks."""
    done = colchis("submit", str(EXAMPLE), *SETTINGS, "--run", "third", "--shape", "nope")
    assert done.returncode == 78
    assert "no WorkflowTemplate 'colchis-sync-nope'" in done.stderr
    assert "colchis-sync-cpu" in done.stderr


@pytest.mark.slow
def test_a_request_starts_one_run_and_made_again_ends_at_once(
    submitted: list[dict[str, Any]], cluster: Cluster, store: Store, tmp_path: Path
) -> None:
    """Fault: GitOps that applies a file again (the Workflow was garbage-collected) and so trains twice."""
    done = colchis("request", str(EXAMPLE), *SETTINGS, "--run", "asked", "--to", str(tmp_path))
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    name = yaml.safe_load(path.read_text())["metadata"]["name"]

    def start() -> dict[str, Any]:
        apply(yaml.safe_load(path.read_text()))
        return cluster.wait([name], deadline_s=900)[name]

    status = start()
    assert status["phase"] == "Succeeded", cluster.logs(name)
    serving = store.get(keys.serving(name)).data
    cluster.delete("workflows", name)
    again = start()
    assert again["phase"] == "Succeeded", cluster.logs(name)
    pods = {n.get("templateName") for n in again["nodes"].values() if n["type"] == "Pod"}
    assert pods == {"begin", "close", "evaluate"}, "the last version's evaluation is looked for, and found"
    assert store.get(keys.serving(name)).data == serving
    key = keys.run_outcome(name, name)
    assert Outcome.from_bytes(store.get(key).data, key).status == "Succeeded"


@pytest.mark.slow
def test_equal_runs_are_equal_and_diff_says_so(submitted: list[dict[str, Any]], store: Store) -> None:
    """Fault: a run on a cluster that depends on its name, its pods or its hour."""
    other = next(run for key in store.list("runs/asked-") if (run := key.split("/")[1]))
    done = colchis("diff", RUN, other, "--json")
    assert done.returncode == 0, done.stderr
    found = {d["field"]: (d["a"], d["b"]) for d in json.loads(done.stdout)}
    assert found["weights_digest"][0] == found["weights_digest"][1]
    assert found["version"] == [1, 1] or found["version"] == (1, 1)
    assert not [d for d in json.loads(done.stdout) if d["kind"] != "outcome"]


def apply(document: dict[str, Any]) -> None:
    command = ["kubectl", "apply", "-n", "colchis", "-f", "-"]
    done = subprocess.run(command, input=yaml.safe_dump(document), text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Server:
    url: str
    token: str
    log: Path

    def get(self, path: str, **query: str) -> httpx.Response:
        return httpx.get(self.url + path, params=query, headers={"Authorization": f"Bearer {self.token}"}, timeout=30)


@pytest.fixture(scope="module")
def server(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`argo server` as the web UI talks to it, and the token of somebody who may run things and see reports, which the
    server fetches with the viewer's own rights."""
    for name, role in (("test-user", "colchis-user"), ("test-reads-reports", "test-reads-reports")):
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": "test-user", "namespace": "colchis"}],
        }
        apply(binding)
    apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "test-user"}})
    reading = {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["colchis-store"], "verbs": ["get"]}
    apply(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": "test-reads-reports"},
            "rules": [reading],
        }
    )
    token = subprocess.run(
        ["kubectl", "create", "token", "test-user", "-n", "colchis"], capture_output=True, text=True, check=True
    ).stdout.strip()
    port = free_port()
    command = [
        *("argo", "server", "--namespaced", "-n", "colchis", "--managed-namespace", "colchis"),
        *("--secure=false", "--auth-mode=client", "--port", str(port)),
    ]
    log = tmp_path_factory.mktemp("argo-server") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url + "/api/v1/version", deadline_s=60, token=token)  # without one it answers before it works
        yield Server(url, token, log)
    finally:
        process.kill()
        process.wait()


def test_the_submit_form_has_what_it_needs(server: Server) -> None:
    """Fault: a parameter without description, default or choices, so that the UI's form cannot be filled in."""
    found = server.get("/api/v1/workflow-templates/colchis").json()["items"]
    template = next(t for t in found if t["metadata"]["name"] == "colchis-sync-cpu")
    parameters = template["spec"]["arguments"]["parameters"]
    assert all(p.get("description") for p in parameters)
    assert [p["name"] for p in parameters if "value" not in p] == ["run"]
    assert next(p for p in parameters if p["name"] == "mode")["enum"] == ["sync"]


def test_a_run_through_the_server_shows_nodes_logs_and_report(
    server: Server, pool: list[str], cluster: Cluster
) -> None:
    """Fault: what works with a kubeconfig and not in the UI: submit, follow, log, and the report in the viewer."""
    done = colchis(
        *("submit", str(EXAMPLE), *SETTINGS, "--run", "third", "--server", server.url, "--json"),
        ARGO_TOKEN=server.token,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    name = json.loads(done.stdout)["workflow"]
    status = cluster.wait([name], deadline_s=900)[name]
    assert status["phase"] == "Succeeded", cluster.logs(name)
    seen = server.get(f"/api/v1/workflows/colchis/{name}").json()
    close = next(n for n in seen["status"]["nodes"].values() if n.get("templateName") == "close" and n["type"] == "Pod")
    pod = f"{name}-close-{close['id'].rpartition('-')[2]}"
    wanted = {"podName": pod, "logOptions.container": "main"}
    log = server.get(f"/api/v1/workflows/colchis/{name}/log", **wanted).text
    assert "workflow closed" in log, log[:500]
    page = server.get(f"/artifact-files/colchis/workflows/{name}/{close['id']}/outputs/report")
    assert page.status_code == 200, page.text + server.log.read_text()[-2000:]
    assert page.headers["content-type"].startswith("text/html")
    assert "<script" not in page.text
    assert "data:" not in page.text.partition("<body")[2]
    assert "<svg" in page.text


def test_the_server_refuses_a_bad_token(server: Server) -> None:
    """Fault: a refusal that looks like a bug."""
    done = colchis("submit", str(EXAMPLE), *SETTINGS, "--run", "third", "--server", server.url, ARGO_TOKEN="wrong")
    assert done.returncode == 78, done.stderr
    assert "ARGO_TOKEN" in done.stderr
