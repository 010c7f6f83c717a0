"""What is a pod on a cluster: a step directory, one process (or a set of them), and the outputs that it leaves.

The pod's file system is `root/` in the step directory: every path that the template declares (outputs, input artifacts,
emptyDir mounts) lies below it, and the path tags (`{{outputs.parameters.X.path}}`, ...) resolve to there. So does the
value of an environment variable that is such a path. (accepted.py refuses a declared path written out in a command.)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colchis.components.errors import BadConfig
from colchis.workflows.local.accepted import PARAMETER_LIMIT_BYTES
from colchis.workflows.local.artifacts import Repository
from colchis.workflows.local.calls import Ended, Frame, Template
from colchis.workflows.local.container_set import run_set
from colchis.workflows.local.launcher import Command
from colchis.workflows.local.nodes import Node, Phase, fnv32a
from colchis.workflows.local.rules import declared_paths
from colchis.workflows.local.substitution import substitute

if TYPE_CHECKING:
    from colchis.workflows.local.workflow import WorkflowRun

POD_DEADLINE = "Pod was active on the node longer than the specified deadline"
STEP_DEADLINE = "Step exceeded its deadline"
DEADLINES = (POD_DEADLINE, STEP_DEADLINE)
PROGRESS_INTERVAL_S = 1.0  # Argo's executor looks every 3 s; a file has no event that is portable
EXECUTOR_ERROR = 64  # what Argo's own executor exits with
_VARIABLE = re.compile(r"\$(\$|\(([A-Za-z_][A-Za-z0-9_.-]*)\))")


class OutputError(Exception):
    """A required output is missing or too large: the wait container fails, the node is Error."""


class Pod:
    """One attempt of a container, containerSet or resource template."""

    def __init__(self, run: WorkflowRun, node: Node, template: Template, frame: Frame) -> None:
        self.run, self.node, self.template, self.frame = run, node, template, frame
        self.name = f"{run.name}-{node.template}-{fnv32a(node.name)}"
        self.directory = run.directory / f"{node.template[:24]}-{fnv32a(node.name):08x}"
        self.root = self.directory / "root"
        self.repository = Repository(run.settings.work_dir / "artifacts")
        declared = substitute(declared_paths(template), frame.scope)
        self.paths = {tag: self.inside(path) for tag, path in declared.items()}
        self.scope = {**frame.scope, **{tag: str(path) for tag, path in self.paths.items()}, "pod.name": self.name}

    async def execute(self) -> None:
        """Runs the pod and marks its node; raises what the substitution of its fields raises, and OutputError."""
        if "resource" in self.template:
            self._create_successor()
            return
        self._prepare()
        if "containerSet" in self.template:
            phase, message, stopped = await run_set(self)
        else:
            ended = await self.run_container(self.template["container"], "main")
            stopped = ended.stopped
            self.node.outputs.exit_code = None if stopped in DEADLINES else ended.code
            phase, message = Phase.SUCCEEDED, ""
            if stopped is not None or ended.code != 0:
                phase, message = Phase.FAILED, stopped or f"main: {ended.message}"
        if stopped is not None and stopped not in DEADLINES:
            self._default_outputs()
        else:
            try:
                self._collect(strict=phase is Phase.SUCCEEDED)
            except OutputError as error:
                phase, message = Phase.ERROR, f"wait: Error (exit code {EXECUTOR_ERROR}): {error}"
        self.run.nodes.mark(self.node, phase, message)
        (self.directory / "status.json").write_text(json.dumps(self.node.as_status(), indent=1))

    # The pod's file system

    def inside(self, path: str) -> Path:
        """Where a path of the pod lies on this machine."""
        return self.root / path.lstrip("/")

    def _mounts(self) -> list[str]:
        """Mount paths of emptyDir volumes; `/tmp` is always one."""
        spec = self.template.get("containerSet") or {"containers": [self.template["container"]]}
        mounts = [*spec.get("volumeMounts", []), *(m for c in spec["containers"] for m in c.get("volumeMounts", []))]
        volumes = [*self.template.get("volumes", []), *self.run.spec.get("volumes", [])]
        empty = {volume["name"] for volume in volumes if "emptyDir" in volume}
        return ["/tmp", *(mount["mountPath"] for mount in mounts if mount["name"] in empty)]

    def _prepare(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        for path in (*map(self.inside, self._mounts()), *(path.parent for path in self.paths.values())):
            path.mkdir(parents=True, exist_ok=True)
        for artifact in self.template.get("inputs", {}).get("artifacts", []):
            name = artifact["name"]
            key = self.node.input_artifacts.get(name)
            unpack = "none" not in artifact.get("archive", {})
            loaded = key is not None and self.repository.load(key, self.paths[f"inputs.artifacts.{name}.path"], unpack)
            if not loaded and not artifact.get("optional"):
                raise OutputError(f"init: Error (exit code {EXECUTOR_ERROR}): artifact {name}: no object {key}")

    # The process

    def _declared(self, container: Mapping[str, Any]) -> dict[str, str]:
        """What the template declares as env and envFrom; the run's own environment decides the values it has."""
        settings = self.run.settings
        values: dict[str, str] = {}
        for source in container.get("envFrom", []):
            reference = source.get("secretRef") or source["configMapRef"]
            found = settings.secrets.get(substitute(reference["name"], self.scope))
            if found is None and not reference.get("optional"):
                raise self._no_secret(reference["name"])
            values |= {source.get("prefix", "") + key: value for key, value in (found or {}).items()}
        for entry in container.get("env", []):
            name = entry["name"]
            value = settings.environment[name] if name in settings.environment else self._variable(entry, values)
            values |= {} if value is None else {name: value}
        return values

    def _variable(self, entry: Mapping[str, Any], before: Mapping[str, str]) -> str | None:
        """The value of one `env` entry; None for an optional one that isn't there."""
        source = entry.get("valueFrom")
        if source is None:
            value = expand_variables(substitute(entry.get("value", ""), self.scope), before)
            inside = any(value == mount or value.startswith(f"{mount.rstrip('/')}/") for mount in self._mounts())
            return str(self.inside(value)) if inside else value
        if "fieldRef" in source:
            return self._field(source["fieldRef"]["fieldPath"])
        reference = source.get("secretKeyRef") or source["configMapKeyRef"]
        name = substitute(reference["name"], self.scope)
        found = self.run.settings.secrets.get(name, {}).get(reference["key"])
        if found is None and not reference.get("optional"):
            raise self._no_secret(f"{name}[{reference['key']}] for {entry['name']}")
        return found

    def _no_secret(self, what: str) -> BadConfig:
        return BadConfig(
            f"template {self.node.template!r} reads the Secret or ConfigMap {what}, which this run does not have",
            hint="give it to the interpreter as a secret, or the variable in its environment",
        )

    def _field(self, path: str) -> str:
        fields = {"metadata.name": self.name, "metadata.namespace": self.run.namespace, "metadata.uid": self.node.id}
        return {**fields, "spec.nodeName": socket.gethostname(), "status.podIP": "127.0.0.1"}[path]

    async def run_container(
        self, container: Mapping[str, Any], name: str, *, abandoned: asyncio.Event | None = None
    ) -> Ended:
        """Runs one container to its end, or until it is `abandoned`."""
        settings, declared = self.run.settings, self._declared(container)
        own = {"TMPDIR": str(self.inside("/tmp")), "ARGO_PROGRESS_FILE": str(self.directory / "progress")}
        environment = {**settings.base_environment, **declared, **settings.environment, **own}
        words = substitute([*container["command"], *container.get("args", [])], self.scope)
        argv = tuple(expand_variables(word, declared) for word in words)
        working = container.get("workingDir")
        directory = self.inside(substitute(working, self.scope)) if working else self.directory
        directory.mkdir(parents=True, exist_ok=True)
        prefix = "" if "container" in self.template else f"{name}."
        logged = {"argv": argv, "environment": sorted(environment), "directory": str(directory)}  # names, not secrets
        (self.directory / f"{prefix}command.json").write_text(json.dumps(logged, indent=1))
        stdout, stderr = self.directory / f"{prefix}stdout.log", self.directory / f"{prefix}stderr.log"
        command = Command(argv, environment, directory, stdout, stderr)
        deadline = self.template.get("activeDeadlineSeconds")
        deadline_s = None if deadline is None else float(substitute(str(deadline), self.scope))
        async with self._progress():
            ended = await self.run.supervise(command, deadline_s, self.frame.on_exit, abandoned=abandoned)
        if self.frame.capture_result and name == "main":
            with open(stdout, "rb") as file:
                file.seek(max(0, stdout.stat().st_size - PARAMETER_LIMIT_BYTES))
                self.node.outputs.result = file.read().decode(errors="replace").removesuffix("\n")
        return ended

    @contextlib.asynccontextmanager
    async def _progress(self) -> AsyncIterator[None]:
        file = self.directory / "progress"
        task = asyncio.create_task(self._watch_progress(file))
        try:
            yield
        finally:
            task.cancel()
            self._read_progress(file)

    async def _watch_progress(self, file: Path) -> None:
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            self._read_progress(file)

    def _read_progress(self, file: Path) -> None:
        try:
            lines = file.read_text().split()
        except FileNotFoundError:
            return
        if lines and re.fullmatch(r"\d+/\d+", lines[-1]) and lines[-1] != self.node.progress:
            self.node.progress = lines[-1]
            self.run.report_progress(self.node)

    # The outputs

    def _collect(self, *, strict: bool) -> None:
        """Reads output parameters and saves artifacts; of a failed pod (not `strict`) whatever is there."""
        outputs = self.template.get("outputs", {})
        for parameter in outputs.get("parameters", []):
            source = parameter["valueFrom"]
            default = substitute(source["default"], self.scope) if "default" in source else None
            file = self.paths[f"outputs.parameters.{parameter['name']}.path"]
            if file.is_file():
                value = file.read_bytes()
                if len(value) > PARAMETER_LIMIT_BYTES:
                    limit = f"{PARAMETER_LIMIT_BYTES} bytes fit into the status of a workflow"
                    raise OutputError(f"outputs.parameters.{parameter['name']} has {len(value)} bytes: only {limit}")
                self.node.outputs.parameters[parameter["name"]] = value.decode().removesuffix("\n")
            elif default is not None:
                self.node.outputs.parameters[parameter["name"]] = default
            elif strict:
                raise OutputError(f"open {source['path']}: no such file (outputs.parameters.{parameter['name']})")
        for artifact in outputs.get("artifacts", []):
            path = self.paths[f"outputs.artifacts.{artifact['name']}.path"]
            pack = "none" not in artifact.get("archive", {})
            if path.exists():
                default_key = f"{self.run.name}/{self.name}/{artifact['name']}{'.tgz' if pack else ''}"
                key = substitute(artifact["s3"]["key"], self.scope) if "s3" in artifact else default_key
                self.repository.save(path, key, pack=pack)
                self.node.outputs.artifacts[artifact["name"]] = key
            elif strict and not artifact.get("optional"):
                raise OutputError(f"artifact {artifact['name']}: {artifact['path']} does not exist")

    def _default_outputs(self) -> None:
        """What a controller does on stop: outputs are not read, a default silently takes their place."""
        for parameter in self.template.get("outputs", {}).get("parameters", []):
            if "default" in parameter["valueFrom"]:
                default = substitute(parameter["valueFrom"]["default"], self.scope)
                self.node.outputs.parameters[parameter["name"]] = default

    def _create_successor(self) -> None:
        resource = substitute(self.template["resource"], self.scope)
        refusal = self.run.create_successor(resource["manifest"], resource["action"], self.node.template)
        if refusal is None:
            self.run.nodes.mark(self.node, Phase.SUCCEEDED)
            self.node.outputs.exit_code = 0
        else:
            self.node.outputs.exit_code = EXECUTOR_ERROR
            self.run.nodes.mark(self.node, Phase.FAILED, f"main: Error (exit code {EXECUTOR_ERROR}): {refusal}")


def expand_variables(text: str, environment: Mapping[str, str]) -> str:
    """`$(NAME)` as Kubernetes expands it in commands and env; `$$` is one dollar, unknown names stay.

    >>> expand_variables("--dir=$(TMPDIR)/$$HOME $(NO)", {"TMPDIR": "/t"})
    '--dir=/t/$HOME $(NO)'
    """

    def replace(match: re.Match[str]) -> str:
        return "$" if match.group(1) == "$" else environment.get(match.group(2), match.group())

    return _VARIABLE.sub(replace, text)
