"""The interpreter of rendered Argo manifests: runs a Workflow, and then the Workflows that it created.

>>> interpreter = Interpreter(load_templates(Path("manifests/base")), work_dir=Path("runs/demo"), launcher=ExecLauncher(),
...                           environment=os.environ, secrets={}, on_event=print)          # doctest: +SKIP
>>> result = await interpreter.run({"kind": "Workflow", "metadata": {"name": "demo"}, "spec": {
...     "workflowTemplateRef": {"name": "colchis-sync-cpu"},
...     "arguments": {"parameters": [{"name": "run", "value": "demo"}]}}})                  # doctest: +SKIP

What it accepts is in accepted.py; everything else is refused by name. State of a run lies in
`work_dir/WORKFLOW/status.json` (the shape of a Workflow's status) and in one directory per pod.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import string
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from colchis.components.errors import BadConfig
from colchis.workflows.local.accepted import check, load_manifests, load_templates
from colchis.workflows.local.calls import Event, EventKind, Settings
from colchis.workflows.local.expression_tree import ExpressionError
from colchis.workflows.local.expressions import evaluate
from colchis.workflows.local.launcher import Launcher
from colchis.workflows.local.nodes import Nodes, Phase, timestamp
from colchis.workflows.local.spec_check import check_spec
from colchis.workflows.local.substitution import substitute
from colchis.workflows.local.workflow import WorkflowRun

BASE_ENVIRONMENT = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "OMP_NUM_THREADS"),
)


@dataclass(frozen=True)
class WorkflowResult:
    """How a workflow ended. `nodes` has the shape of `status.nodes`; `predecessors` are those that led to it."""

    name: str
    phase: Phase
    message: str
    nodes: Mapping[str, Mapping[str, Any]]
    predecessors: tuple[WorkflowResult, ...] = field(default=())

    @property
    def succeeded(self) -> bool:
        """Whether this workflow and all of its predecessors did."""
        return all(result.phase is Phase.SUCCEEDED for result in (self, *self.predecessors))


class Interpreter:
    """Runs Workflows over a set of WorkflowTemplates, as one namespace of a cluster would.

    - `environment` is the run's own (store, engines, credentials): it wins over a template's `env`.
    - `secrets` stands for Secrets and ConfigMaps: name -> key -> value.
    - `on_event` is called in the event loop and must not block.
    - `grace_s` is what a process has between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        templates: Mapping[str, Mapping[str, Any]],
        *,
        work_dir: Path,
        environment: Mapping[str, str],
        secrets: Mapping[str, Mapping[str, str]],
        launcher: Launcher,
        on_event: Callable[[Event], None],
        grace_s: float = 30.0,
        namespace: str = "local",
    ) -> None:
        base = {name: os.environ[name] for name in BASE_ENVIRONMENT if name in os.environ}
        work_dir = work_dir.absolute()
        self._settings = Settings(work_dir, dict(environment), base, secrets, launcher, on_event, grace_s)
        self._templates = templates
        self._namespace = namespace
        self._known: set[str] = set()
        self._mutexes: dict[str, asyncio.Lock] = {}
        self._running: list[WorkflowRun] = []
        self._ignored: set[str] = set()
        self._strategy: str | None = None

    async def run(self, workflow: Mapping[str, Any]) -> WorkflowResult:
        """Runs a Workflow, then its successors one after the other; the result is that of the last one.

        Raises BadConfig for a manifest outside the accepted subset.
        """
        self._known.add(_name(workflow))
        successors: deque[Mapping[str, Any]] = deque()
        result = await self._run_one(workflow, successors)
        while successors and self._strategy is None:
            following = await self._run_one(successors.popleft(), successors)
            before = (*result.predecessors, WorkflowResult(result.name, result.phase, result.message, result.nodes))
            result = WorkflowResult(following.name, following.phase, following.message, following.nodes, before)
        return result

    def stop(self) -> None:
        """As `argo stop`: running pods get SIGTERM, nothing else starts, exit handlers run, no successor follows."""
        self._shut_down("Stop")

    def terminate(self) -> None:
        """As `argo terminate`: like stop, without exit handlers."""
        self._shut_down("Terminate")

    def _shut_down(self, strategy: str) -> None:
        self._strategy = strategy
        for run in self._running:
            run.stop(strategy)

    async def _run_one(self, workflow: Mapping[str, Any], successors: deque[Mapping[str, Any]]) -> WorkflowResult:
        name = _name(workflow)
        spec = self._complete(workflow)
        values = self._values(name, workflow, spec)
        on_event = self._settings.on_event
        try:
            check_spec(spec, values)
            locks = sorted(substitute(m["name"], values) for m in spec.get("synchronization", {}).get("mutexes", []))
            run = WorkflowRun(name, spec, values, self._settings, partial(self._create_successor, successors))
        except ValueError as error:
            return self._invalid(name, f"invalid spec: {error}")
        async with AsyncExitStack() as held:
            for lock in locks:
                await held.enter_async_context(self._mutexes.setdefault(lock, asyncio.Lock()))
            self._running.append(run)
            if self._strategy is not None:
                run.stop(self._strategy)
            try:
                on_event(Event(EventKind.WORKFLOW_STARTED, name))
                await run.execute_all()
            except BaseException:
                run.nodes.finish(Phase.ERROR, "the interpreter was interrupted")
                raise
            finally:
                self._running.remove(run)
        nodes = run.nodes
        on_event(Event(EventKind.WORKFLOW_FINISHED, name, phase=nodes.phase, message=nodes.message))
        return WorkflowResult(name, nodes.phase, nodes.message, nodes.as_status()["status"]["nodes"])

    def _invalid(self, name: str, message: str) -> WorkflowResult:
        """A Workflow that fails before it starts, as a controller fails it."""
        folder = self._settings.work_dir / name
        folder.mkdir(parents=True, exist_ok=True)
        Nodes(name, folder / "status.json").finish(Phase.FAILED, message)
        self._settings.on_event(Event(EventKind.WORKFLOW_FINISHED, name, phase=Phase.FAILED, message=message))
        return WorkflowResult(name, Phase.FAILED, message, {})

    def _complete(self, workflow: Mapping[str, Any]) -> dict[str, Any]:
        """The spec with its WorkflowTemplate merged in; what the Workflow sets itself wins."""
        self._check(workflow)
        spec = dict(workflow["spec"])
        reference = spec.pop("workflowTemplateRef", None)
        if reference is not None:
            if spec.get("templates"):
                raise BadConfig(f"Workflow {_name(workflow)} has both workflowTemplateRef and templates")
            if reference["name"] not in self._templates:
                known = ", ".join(sorted(self._templates)) or "none"
                raise BadConfig(f"no WorkflowTemplate {reference['name']!r}; there are: {known}", hint="render it")
            template = self._templates[reference["name"]]
            self._check(template)
            arguments = {p["name"]: p for p in template["spec"].get("arguments", {}).get("parameters", [])}
            arguments |= {p["name"]: p for p in spec.get("arguments", {}).get("parameters", [])}
            spec = {**template["spec"], **spec, "arguments": {"parameters": list(arguments.values())}}
        for required in ("entrypoint", "templates"):
            if not spec.get(required):
                raise BadConfig(f"Workflow {_name(workflow)} has no spec.{required}")
        return spec

    def _check(self, manifest: Mapping[str, Any]) -> None:
        new = [field for field in check(manifest) if field not in self._ignored]
        self._ignored.update(new)
        if new:
            self._settings.on_event(Event(EventKind.IGNORED, _name(manifest), message=", ".join(new)))

    def _values(self, name: str, workflow: Mapping[str, Any], spec: Mapping[str, Any]) -> dict[str, str]:
        """The `workflow.*` tags."""
        now = datetime.now(UTC)
        values = {
            "workflow.name": name,
            "workflow.namespace": self._namespace,
            "workflow.uid": str(uuid.uuid4()),
            "workflow.mainEntrypoint": spec["entrypoint"],
            "workflow.serviceAccountName": spec.get("serviceAccountName", ""),
            "workflow.creationTimestamp": timestamp(now),
            "workflow.creationTimestamp.s": str(int(now.timestamp())),
            "workflow.creationTimestamp.RFC3339": timestamp(now),
        }
        given = spec.get("workflowMetadata", {})
        for kind in ("labels", "annotations"):
            for key, value in {**given.get(kind, {}), **workflow["metadata"].get(kind, {})}.items():
                values[f"workflow.{kind}.{key}"] = value
        parameters = []
        for parameter in spec.get("arguments", {}).get("parameters", []):
            value = parameter.get("value", parameter.get("default"))
            if value is None:
                raise BadConfig(f"workflow parameter {parameter['name']!r} has no value", where=name, hint="pass it")
            parameters.append({"name": parameter["name"], "value": value})
            values[f"workflow.parameters.{parameter['name']}"] = value
        values["workflow.parameters"] = json.dumps(parameters, separators=(",", ":"))
        for label, source in given.get("labelsFrom", {}).items():
            try:
                found = evaluate(source["expression"], values)
            except ExpressionError as error:
                raise BadConfig(str(error), where=f"{name}: spec.workflowMetadata.labelsFrom.{label}") from error
            if not isinstance(found, str):
                raise BadConfig(
                    f"the expression of label {label} gives {found!r}, not a text",
                    where=f"{name}: spec.workflowMetadata.labelsFrom.{label}",
                    hint="string(...) makes one",
                )
            values[f"workflow.labels.{label}"] = found
        return values

    def _create_successor(
        self, successors: deque[Mapping[str, Any]], text: str, action: str, template: str
    ) -> str | None:
        """Queues the Workflow of a resource template; the reason when the API server would refuse it."""
        try:
            manifest = yaml.load(text, Loader=yaml.CSafeLoader)
        except yaml.YAMLError as error:
            raise BadConfig(f"the manifest of resource template {template!r} is not YAML: {error}") from error
        if not isinstance(manifest, dict) or manifest.get("kind") != "Workflow":
            found = manifest.get("kind") if isinstance(manifest, dict) else type(manifest).__name__
            raise BadConfig(
                f"resource template {template!r} creates a {found}: on one machine only a successor Workflow can be"
            )
        name = manifest.get("metadata", {}).get("name")
        if not name:
            raise BadConfig(f"the Workflow of resource template {template!r} needs a fixed metadata.name")
        if name in self._known:
            exists = f'workflows.argoproj.io "{name}" already exists'
            return None if action == "apply" else f"Error from server (AlreadyExists): {exists}"
        self._complete(manifest)
        self._known.add(name)
        successors.append(manifest)
        return None


def _name(manifest: Mapping[str, Any]) -> str:
    """metadata.name; drawn for a Workflow with generateName, and kept in its manifest."""
    metadata = manifest.get("metadata", {})
    if not metadata.get("name"):
        if not metadata.get("generateName"):
            raise BadConfig("a Workflow needs metadata.name or metadata.generateName")
        suffix = "".join(random.choices(string.ascii_lowercase + string.digits, k=5))
        metadata["name"] = metadata["generateName"] + suffix
    return str(metadata["name"])


__all__ = ["Event", "EventKind", "Interpreter", "WorkflowResult", "load_manifests", "load_templates"]
