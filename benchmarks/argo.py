"""Seconds per iteration on Argo: a run of the example against the same template whose stages only import and exit.

Both have the same pods, in the same order, on the same cluster, with as many iterations; what remains of the ratio is the
stages' work, and what they say to store and engines. Rounds alternate between the two; the best median of each counts.
Needs a cluster, with pool `main` scaled up to two engines by this program:

    python -m tests.cluster.harness run .venv/bin/python -m benchmarks.argo --rounds 2 --iterations 6
"""

from __future__ import annotations

import copy
import json
import statistics
from collections import defaultdict
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import yaml

from colchis.components.config import load
from colchis.components.store import Store, StoreSettings
from colchis.workflows.request import pin_files, workflow
from tests.cluster.client import Cluster
from tests.cluster.conftest import wait_for

REPOSITORY = Path(__file__).parents[1]
EXAMPLE = REPOSITORY / "examples/arithmetic/run.yaml"
TEMPLATE = REPOSITORY / "manifests/base/templates/colchis-sync-cpu.yaml"
STAGES = ("rollout", "batch", "train", "reload")
TORCH = "torch, transformers.models.qwen2.modeling_qwen2, colchis.components.trainer, "
DEADLINE_S = 1800.0

Json = Any


def idle_template(iterations: int) -> Json:
    """The template with stages that import what they import, write nothing and end well: defaults take over."""
    template = copy.deepcopy(yaml.safe_load(TEMPLATE.read_text()))
    template["metadata"]["name"] = "colchis-sync-idle"
    outputs = {"count": str(iterations), "fill": "true", "decision": "trainable", "every": "1000000"}
    for body in template["spec"]["templates"]:
        containers = [body["container"]] if "container" in body else body.get("containerSet", {}).get("containers", [])
        for container in containers:
            stage = container["command"][3]
            modules = (TORCH if stage == "train" else "") + f"colchis.components.stages.{stage}"
            container["command"] = ["python", "-c", f"import colchis.components.__main__, {modules}"]
            container["args"] = []
        for parameter in body.get("outputs", {}).get("parameters", []):
            if parameter["name"] in outputs:
                parameter["valueFrom"]["default"] = outputs[parameter["name"]]
    return template


def seconds_of(nodes: dict[str, Json]) -> tuple[list[float], dict[str, list[float]]]:
    """Seconds between the ends of iterations, and per stage from the start of its node to its end."""
    ends, stages = [], defaultdict(list)
    for node in nodes.values():
        if node["type"] == "Retry" and node["displayName"].partition("(")[0] in STAGES:
            stages[node["displayName"].partition("(")[0]].append(_time(node["finishedAt"]) - _time(node["startedAt"]))
        if node["displayName"].startswith("iterate("):
            ends.append(_time(node["finishedAt"]))
    return [end - before for before, end in pairwise(sorted(ends))], stages


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


@click.command(help=__doc__)
@click.option("--iterations", type=click.IntRange(2), default=6, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def main(iterations: int, rounds: int, as_json: bool) -> None:
    cluster, store = Cluster(), Store(StoreSettings.from_environment())
    config = pin_files(load(EXAMPLE, [f"loop.iterations={iterations}"]), EXAMPLE, store)
    cluster.apply_template(idle_template(iterations))
    found: dict[str, list[tuple[list[float], dict[str, list[float]]]]] = {"run": [], "idle": []}
    with cluster.scaled("colchis-engines-main", 2) as addresses:
        for address in addresses.values():
            wait_for(f"http://{address}:9000/live", deadline_s=180)
        for number in range(rounds):
            for kind in found:
                document = workflow(config, run=f"{kind}-{number}", pool="main", shape="cpu")
                if kind == "idle":
                    document["spec"]["workflowTemplateRef"]["name"] = "colchis-sync-idle"
                name = cluster.create(document)
                assert name is not None
                status = cluster.wait([name], DEADLINE_S)[name]
                if status["phase"] != "Succeeded":
                    raise click.ClickException(f"{name}: {status.get('message')}\n{cluster.logs(name)}")
                found[kind].append(seconds_of(status["nodes"]))
    medians = {kind: min(statistics.median(between) for between, _ in rounds) for kind, rounds in found.items()}
    stages = {
        stage: {kind: min(statistics.median(s[stage]) for _, s in rounds) for kind, rounds in found.items()}
        for stage in STAGES
    }
    ratio = medians["run"] / medians["idle"]
    if as_json:
        click.echo(json.dumps({"iteration_s": medians, "stages_s": stages, "ratio": ratio}))
        return
    click.echo(f"{'seconds':<12}{'run':>8}{'idle':>8}")
    for name, pair in {**stages, "iteration": medians}.items():
        click.echo(f"{name:<12}{pair['run']:8.1f}{pair['idle']:8.1f}")
    click.echo(f"{'ratio':<12}{ratio:8.2f}")


if __name__ == "__main__":
    main()
