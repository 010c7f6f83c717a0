"""The conformance table: tiny Workflows with what a controller makes of them, checked on any executor.

A case is a file with two YAML documents: `expect: ...`, then a complete Workflow. An executor runs the Workflow and gives
its status, in the shape of Argo's, to `check`. The interpreter does so in test_interpreter.py, a cluster elsewhere:

    for case in load_cases():
        status = ...run case.workflow...
        assert check(case, status["nodes"], status["phase"], status["message"]) == []

Keys of `expect`:
    about     the rule that the case pins
    core      true for the ten that a short run takes
    phase     of the workflow;   message: part of its message
    nodes     node name without the workflow's -> what is expected: phase (or a list of them), type, message (a part of
              it), outputs (parameters by name), result, exitCode (or a list), children (number); `absent: true` for no
              such node
    order     lists of node names: each has finished before the next one has started
    successors  names of Workflows that exist afterwards, each with its phase
    refused   part of the interpreter's error; the case isn't run. `phase` is then what a controller makes of it, and
              `rejected: true` says that the API server doesn't take it (with the full CRDs)
    needs     what a cluster must offer: `artifacts` (a repository), `submitter` (rights to create Workflows)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "cases"


@dataclass(frozen=True)
class Case:
    name: str
    workflow: dict[str, Any]
    expect: Mapping[str, Any]

    @property
    def core(self) -> bool:
        return bool(self.expect.get("core"))

    @property
    def refused(self) -> str | None:
        """Part of the error with which the interpreter refuses the case."""
        return self.expect.get("refused")


def load_cases(*, core_only: bool = False) -> list[Case]:
    """All cases, by name. Each call gives fresh manifests."""
    cases = []
    for path in sorted(FOLDER.glob("*.yaml")):
        expectation, workflow = yaml.safe_load_all(path.read_text())
        case = Case(path.stem, workflow, expectation["expect"])
        if case.core or not core_only:
            cases.append(case)
    return cases


def check(case: Case, nodes: Mapping[str, Mapping[str, Any]], phase: str, message: str | None = None) -> list[str]:
    """What differs from the expectation: empty when the executor conforms. `nodes` is `status.nodes`."""
    expect, wrong = case.expect, []
    if phase != expect["phase"]:
        wrong.append(f"workflow: phase {phase}, expected {expect['phase']} ({message})")
    if expect.get("message") and expect["message"] not in (message or ""):
        wrong.append(f"workflow: message {message!r} lacks {expect['message']!r}")
    by_name = _by_name(nodes.values())
    for name, wanted in expect.get("nodes", {}).items():
        wrong += _check_node(name, wanted, by_name.get(name), by_name)
    for chain in expect.get("order", []):
        for first, second in pairwise(chain):
            if first not in by_name or second not in by_name:
                wrong.append(f"order: no node {first!r} or {second!r}")
            elif by_name[first]["finishedAt"] > by_name[second]["startedAt"]:
                wrong.append(f"order: {first!r} ended {by_name[first]['finishedAt']}, after the start of {second!r}")
    return wrong


def _by_name(nodes: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Nodes by their name without that of the workflow, which is the one whose name is its id."""
    nodes = list(nodes)
    root = next((node["name"] for node in nodes if node["name"] == node["id"]), "")
    return {node["name"].removeprefix(root): node for node in nodes}


def _check_node(
    name: str, wanted: Mapping[str, Any], node: Mapping[str, Any] | None, all_nodes: Mapping[str, Any]
) -> list[str]:
    if wanted.get("absent"):
        return [f"{name}: exists ({node['phase']})"] if node is not None else []
    if node is None:
        return [f"{name}: no such node among {sorted(all_nodes)}"]
    wrong = []
    phases = wanted.get("phase", node["phase"])
    if node["phase"] not in ([phases] if isinstance(phases, str) else phases):
        wrong.append(f"{name}: phase {node['phase']}, expected {phases} ({node.get('message')})")
    if wanted.get("type", node["type"]) != node["type"]:
        wrong.append(f"{name}: type {node['type']}, expected {wanted['type']}")
    if wanted.get("message", "") not in node.get("message", ""):
        wrong.append(f"{name}: message {node.get('message')!r} lacks {wanted['message']!r}")
    outputs = node.get("outputs", {})
    parameters = {parameter["name"]: parameter.get("value") for parameter in outputs.get("parameters", [])}
    for key, value in wanted.get("outputs", {}).items():
        if parameters.get(key) != value:
            wrong.append(f"{name}: output {key} is {parameters.get(key)!r}, expected {value!r}")
    for key in ("result", "exitCode"):
        accepted = wanted.get(key, outputs.get(key))
        if outputs.get(key) not in (accepted if isinstance(accepted, list) else [accepted]):
            wrong.append(f"{name}: {key} is {outputs.get(key)!r}, expected {accepted!r}")
    if "children" in wanted and len(node.get("children", [])) != wanted["children"]:
        wrong.append(f"{name}: {len(node.get('children', []))} children, expected {wanted['children']}")
    return wrong
