"""Small runs on the cluster: started, followed to their end, and what they leave in the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from colchis.components.records.iteration import Summary
from colchis.components.store import Store, keys
from tests.cluster.client import Cluster

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 900.0
"""Longest time for a run of a few iterations and all its faults, on a loaded machine."""
ITERATIONS = 2


def colchis(*words: str, deadline_s: float = 900.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """One `colchis` command, to its end."""
    command = [sys.executable, "-m", "colchis.workflows.cli", *words]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, env=env, check=False)


def submit(config: Path, run: str, *words: str) -> str:
    """Starts a run; the name of its Workflow."""
    done = colchis("submit", str(config), "--run", run, "--json", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(json.loads(done.stdout.splitlines()[0])["workflow"])


def ended(
    cluster: Cluster, workflow: str, *, phase: str = "Succeeded", deadline_s: float = DEADLINE_S
) -> dict[str, Any]:
    """The status of a Workflow when it has ended, as it should."""
    status = cluster.wait([workflow], deadline_s=deadline_s)[workflow]
    failed = {n["name"]: n.get("message") for n in status["nodes"].values() if n["phase"] in ("Failed", "Error")}
    assert status["phase"] == phase, f"{status.get('message')}: {failed}\n{cluster.logs(workflow)}"
    return dict(status)


def digests_of(store: Store, run: str, iterations: int = ITERATIONS) -> list[str]:
    """The weights after each iteration: what must not depend on how often something was killed."""
    found = [keys.summary(run, iteration) for iteration in range(iterations)]
    return [Summary.from_bytes(store.get(key).data, key).weights_digest for key in found]


def argo(*words: str) -> str:
    """What one command of Argo's own client says, at its end."""
    done = subprocess.run(["argo", *words, "-n", "colchis"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shape(cluster: Cluster, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Installs the template of the mode for another shape: that of `cpu`, with `change` applied to its templates by name."""
    template = yaml.safe_load((REPOSITORY / "manifests/base/templates/colchis-sync-cpu.yaml").read_text())
    template["metadata"].update(name=f"colchis-sync-{name}", namespace="colchis")
    change({t["name"]: t for t in template["spec"]["templates"]})
    cluster.apply_template(template)
