"""What is a pod on a cluster: a step directory, one process (or a set of them), and the outputs that it leaves.

The pod's file system is `root/` in the step directory: every path that the template declares (outputs, input artifacts,
mounts) lies below it, and the path tags (`{{outputs.parameters.X.path}}`, ...) resolve to there. A declared path that
is written out in a command would reach the machine's own file system, so it is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colchis.components.errors import BadConfig
from colchis.workflows.local.accepted import PARAMETER_LIMIT_BYTES
from colchis.workflows.local.artifacts import Repository
from colchis.workflows.local.durations import seconds
from colchis.workflows.local.launcher import CannotStart, Command
from colchis.workflows.local.nodes import Node, Phase, fnv32a
from colchis.workflows.local.substitution import substitute

if TYPE_CHECKING:
    from colchis.workflows.local.workflow import Frame, WorkflowRun

POD_DEADLINE = "Pod was active on the node longer than the specified deadline"
PROGRESS_INTERVAL_S = 1.0  # Argo's executor looks every 3 s; a file has no event that is portable
STAGE_ERROR = 64  # what Argo's own executor exits with


class OutputError(Exception):
    """A required output is missing or too large: the wait container fails, the node is Error."""


class Pod:
    """One attempt of a container, containerSet or resource template."""

    def __init__(self, run: WorkflowRun, node: Node, template: Mapping[str, Any], frame: Frame) -> None:
        self.run, self.node, self.template, self.frame = run, node, template, frame
        self.name = f"{run.name}-{node.template}-{fnv32a(node.name)}"
        self.directory = run.directory / f"{node.template[:60]}-{fnv32a(node.name):08x}"
        self.root = self.directory / "root"
        self.repository = Repository(run.settings.work_dir / "artifacts")
        self.scope = {**frame.scope, **self._paths(), "pod.name": self.name}

    async def execute(self) -> None:
        """Runs the pod and marks its node; errors of substitution propagate."""
        if "resource" in self.template:
            self._create_successor()
            return
        self._prepare()
        if "containerSet" in self.template:
            phase, message = await ContainerSet(self).execute()
        else:
            code, stopped = await self.run_container(self.template["container"], "main")
            self.node.outputs.exit_code = code if stopped is None or stopped != POD_DEADLINE else None
            phase, message = Phase.SUCCEEDED, ""
            if stopped is not None:
                phase, message = Phase.FAILED, stopped
            elif code != 0:
                phase, message = Phase.FAILED, f"main: Error (exit code {code})"
        if self.run.stop_reason is not None and not self.frame.on_exit:
            self._default_outputs()
        else:
            try:
                self._collect(strict=phase is Phase.SUCCEEDED)
            except OutputError as error:
                phase, message = Phase.ERROR, f"wait: Error (exit code {STAGE_ERROR}): {error}"
        self.run.nodes.mark(self.node, phase, message)
        (self.directory / "status.json").write_text(json.dumps(self.node.as_status(), indent=1))

    # The pod's file system

    def _declared(self) -> dict[str, str]:
        """Tag of a path -> the path in the pod."""
        inputs, outputs = self.template.get("inputs", {}), self.template.get("outputs", {})
        found = {}
        for artifact in inputs.get("artifacts", []):
            if "path" in artifact:
                found[f"inputs.artifacts.{artifact['name']}.path"] = artifact["path"]
        for artifact in outputs.get("artifacts", []):
            if "path" in artifact:
                found[f"outputs.artifacts.{artifact['name']}.path"] = artifact["path"]
        for parameter in outputs.get("parameters", []):
            if "path" in parameter["valueFrom"]:
                found[f"outputs.parameters.{parameter['name']}.path"] = parameter["valueFrom"]["path"]
        return substitute(found, self.frame.scope)

    def _paths(self) -> dict[str, str]:
        return {tag: str(self.inside(path)) for tag, path in self._declared().items()}

    def inside(self, path: str) -> Path:
        """Where a path of the pod lies on this machine."""
        return self.root / path.lstrip("/")

    def _mounts(self) -> list[str]:
        """Mount paths of emptyDir volumes."""
        spec = self.template.get("containerSet") or {"containers": [self.template["container"]]}
        mounts = [*spec.get("volumeMounts", []), *(m for c in spec["containers"] for m in c.get("volumeMounts", []))]
        volumes = [*self.template.get("volumes", []), *self.run.spec.get("volumes", [])]
        empty = {volume["name"] for volume in volumes if "emptyDir" in volume}
        unknown = {mount["name"] for mount in mounts} - {volume["name"] for volume in volumes}
        if unknown:
            raise BadConfig(f"volumeMounts of {self.node.template!r} name no volume: {', '.join(sorted(unknown))}")
        return [mount["mountPath"] for mount in mounts if mount["name"] in empty]

    def _prepare(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        self.inside("/tmp").mkdir(parents=True)
        for mount in self._mounts():
            self.inside(mount).mkdir(parents=True, exist_ok=True)
        for path in self._paths().values():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        for artifact in self.template.get("inputs", {}).get("artifacts", []):
            key = self.node.input_artifacts.get(artifact["name"])
            target = self.inside(substitute(artifact["path"], self.frame.scope))
            unpack = "none" not in artifact.get("archive", {})
            if key is None and artifact.get("optional"):
                continue
            if key is None or not self.repository.load(key, target, unpack=unpack):
                if not artifact.get("optional"):
                    raise OutputError(f"init: artifact {artifact['name']} failed to load: {key} does not exist")

    def _argv(self, container: Mapping[str, Any]) -> tuple[str, ...]:
        argv = substitute([*container["command"], *container.get("args", [])], self.scope)
        declared = {*self._declared().values(), *self._mounts()}
        for argument in argv:
            own = argument.replace(str(self.root), "\0")
            for path in declared:
                if re.search(rf"(?<![\w./\0-]){re.escape(path.rstrip('/'))}(?![\w.-])", own):
                    raise BadConfig(
                        f"template {self.node.template!r}: the command names the path {path} that the template declares,"
                        " but on this machine it lies elsewhere",
                        where=f"argument {argument[:200]!r}",
                        hint="use {{outputs.parameters.NAME.path}}, {{outputs.artifacts.NAME.path}},"
                        " {{inputs.artifacts.NAME.path}} or $TMPDIR",
                    )
        return tuple(argv)

    # The process

    def _environment(self, container: Mapping[str, Any]) -> dict[str, str]:
        """Base names of this machine < the template's env < the run's own environment."""
        settings = self.run.settings
        values: dict[str, str] = {}
        for source in container.get("envFrom", []):
            reference = source.get("secretRef") or source["configMapRef"]
            found = settings.secrets.get(reference["name"])
            if found is None and not reference.get("optional"):
                raise self._no_secret(reference["name"])
            values |= {source.get("prefix", "") + key: value for key, value in (found or {}).items()}
        for entry in container.get("env", []):
            if entry["name"] in settings.environment:
                continue
            source = entry.get("valueFrom")
            if source is None:
                values[entry["name"]] = substitute(entry.get("value", ""), self.scope)
            elif "fieldRef" in source:
                values[entry["name"]] = self._field(source["fieldRef"]["fieldPath"])
            else:
                reference = source.get("secretKeyRef") or source["configMapKeyRef"]
                found = settings.secrets.get(reference["name"], {}).get(reference["key"])
                if found is not None:
                    values[entry["name"]] = found
                elif not reference.get("optional"):
                    raise self._no_secret(f"{reference['name']}[{reference['key']}] for {entry['name']}")
        own = {"TMPDIR": str(self.inside("/tmp")), "ARGO_PROGRESS_FILE": str(self.directory / "progress")}
        return {**settings.base_environment, **values, **settings.environment, **own}

    def _no_secret(self, what: str) -> BadConfig:
        return BadConfig(
            f"template {self.node.template!r} reads the Secret or ConfigMap {what}, which this run does not have",
            hint="give it to the interpreter as a secret, or the variable in its environment",
        )

    def _field(self, path: str) -> str:
        fields = {"metadata.name": self.name, "metadata.namespace": self.run.namespace, "metadata.uid": self.node.id}
        return {**fields, "spec.nodeName": socket.gethostname(), "status.podIP": "127.0.0.1"}[path]

    async def run_container(self, container: Mapping[str, Any], name: str) -> tuple[int, str | None]:
        """Exit code of one container, and why it was stopped (None when it ended by itself)."""
        argv = self._argv(container)
        environment = self._environment(container)
        working = container.get("workingDir")
        directory = self.inside(substitute(working, self.scope)) if working else self.directory
        directory.mkdir(parents=True, exist_ok=True)
        prefix = "" if "container" in self.template else f"{name}."
        logged = {"argv": argv, "environment": sorted(environment), "directory": str(directory)}  # names, not secrets
        (self.directory / f"{prefix}command.json").write_text(json.dumps(logged, indent=1))
        log = self.directory / f"{prefix}stdout.log"
        command = Command(argv, environment, directory, log, self.directory / f"{prefix}stderr.log")
        deadline_s = self.run.remaining_s(self.frame)
        if "activeDeadlineSeconds" in self.template:
            own_s = float(substitute(str(self.template["activeDeadlineSeconds"]), self.scope))
            deadline_s = own_s if deadline_s is None else min(own_s, deadline_s)
        async with self._progress():
            code, reason = await self.run.supervise(command, deadline_s, stoppable=not self.frame.on_exit)
        if reason == "deadline":
            reason = POD_DEADLINE
        if self.frame.capture_result and name == "main":
            with open(log, "rb") as file:
                file.seek(max(0, log.stat().st_size - PARAMETER_LIMIT_BYTES))
                self.node.outputs.result = file.read().decode(errors="replace").removesuffix("\n")
        return code, reason

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
            if "path" not in source:
                raise OutputError(f"outputs.parameters.{parameter['name']} has no valueFrom.path")
            file = Path(self.scope[f"outputs.parameters.{parameter['name']}.path"])
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
            path = Path(self.scope[f"outputs.artifacts.{artifact['name']}.path"])
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
            self.node.outputs.exit_code = STAGE_ERROR
            self.run.nodes.mark(self.node, Phase.FAILED, f"main: Error (exit code {STAGE_ERROR}): {refusal}")


class ContainerSet:
    """Containers of one pod with dependencies between them; each is a node of its own."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self.spec = pod.template["containerSet"]
        self.codes: dict[str, int] = {}
        self.stopped: str | None = None

    async def execute(self) -> tuple[Phase, str]:
        from colchis.workflows.local.nodes import NodeType

        pod, run = self.pod, self.pod.run
        containers = self.spec["containers"]
        nodes = {
            c["name"]: run.nodes.add(
                f"{pod.node.name}.{c['name']}", NodeType.CONTAINER, pod.node.template, boundary=pod.node
            )
            for c in containers
        }
        for container in containers:
            for dependency in container.get("dependencies", []):
                run.nodes.connect(nodes[dependency], nodes[container["name"]])
            if not container.get("dependencies"):
                run.nodes.connect(pod.node, nodes[container["name"]])
        done = {container["name"]: asyncio.Event() for container in containers}
        async with asyncio.TaskGroup() as group:
            for container in containers:
                group.create_task(self._container(container, nodes, done))
        if "main" in self.codes:
            pod.node.outputs.exit_code = self.codes["main"]
        if self.stopped is not None:
            return Phase.FAILED, self.stopped
        for container in containers:
            if self.codes[container["name"]] != 0:
                return Phase.FAILED, nodes[container["name"]].message
        return Phase.SUCCEEDED, ""

    async def _container(
        self, container: Mapping[str, Any], nodes: Mapping[str, Node], done: Mapping[str, asyncio.Event]
    ) -> None:
        name, run = container["name"], self.pod.run
        node = nodes[name]
        for dependency in container.get("dependencies", []):
            await done[dependency].wait()
            if self.codes[dependency] != 0:
                self.codes[name] = STAGE_ERROR
                why = f'dependency "{dependency}" exited with non-zero code: {self.codes[dependency]}'
                run.nodes.mark(node, Phase.ERROR, f"{name}: Error (exit code {STAGE_ERROR}): {why}")
                done[name].set()
                return
        code, stopped = await self._attempts(container)
        self.codes[name] = code
        if stopped is not None:
            self.stopped = stopped
        if code == 0:
            run.nodes.mark(node, Phase.SUCCEEDED)
        else:
            phase = Phase.ERROR if code == STAGE_ERROR else Phase.FAILED
            run.nodes.mark(node, phase, f"{name}: Error (exit code {code})")
        done[name].set()

    async def _attempts(self, container: Mapping[str, Any]) -> tuple[int, str | None]:
        strategy = substitute(self.spec.get("retryStrategy", {}), self.pod.scope)
        retries = int(strategy.get("retries", 0))
        for attempt in range(retries + 1):
            code, stopped = await self.pod.run_container(container, container["name"])
            if code == 0 or stopped is not None or attempt == retries:
                break
            await asyncio.sleep(seconds(strategy.get("duration", 0)))
        return code, stopped


__all__ = ["CannotStart", "OutputError", "Pod", "signal"]
