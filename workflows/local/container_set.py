"""containerSet templates: containers of one pod with dependencies between them, each a node of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from colchis.workflows.local.calls import Ended, EventKind
from colchis.workflows.local.durations import seconds
from colchis.workflows.local.nodes import Node, NodeType, Phase
from colchis.workflows.local.substitution import substitute

if TYPE_CHECKING:
    from colchis.workflows.local.pods import Pod

DEPENDENCY_FAILED = 64  # the exit code of a container that doesn't run because one before it failed
STOPPED = 143  # that of one that still waits when the pod is stopped, or another container failed


async def run_set(pod: Pod) -> tuple[Phase, str, str | None]:
    """Runs the containers of a pod, in one file system.

    Phase and message of the pod's node, and why it was stopped (None when it ended by itself).
    """
    return await _Set(pod).run()


class _Set:
    def __init__(self, pod: Pod) -> None:
        self.pod, self.workflow = pod, pod.run
        spec = pod.template["containerSet"]
        self.containers: list[Mapping[str, Any]] = spec["containers"]
        self.retries = substitute(spec.get("retryStrategy", {}), pod.scope)
        self.nodes: dict[str, Node] = {}
        self.codes: dict[str, int] = {}
        self.ended = {container["name"]: asyncio.Event() for container in self.containers}
        self.stopped: str | None = None
        self.failed = asyncio.Event()  # the controller then ends what is left of the pod

    async def run(self) -> tuple[Phase, str, str | None]:
        self._add_nodes()
        try:
            async with asyncio.TaskGroup() as group:
                for container in self.containers:
                    group.create_task(self._container(container))
        except ExceptionGroup as errors:  # the first says why; the others were cancelled for it
            raise errors.exceptions[0] from errors
        if "main" in self.codes:
            self.pod.node.outputs.exit_code = self.codes["main"]
        if self.stopped is not None:
            return Phase.FAILED, self.stopped, self.stopped
        failed = sorted(name for name, code in self.codes.items() if code != 0)  # a pod's status has them by name
        return (Phase.FAILED, self.nodes[failed[0]].message, None) if failed else (Phase.SUCCEEDED, "", None)

    def _add_nodes(self) -> None:
        nodes, node = self.workflow.nodes, self.pod.node
        for container in self.containers:
            name = container["name"]
            full = f"{node.name}.{name}"
            self.nodes[name] = nodes.add(full, NodeType.CONTAINER, node.template, boundary=node, flag=node.flag)
        for container in self.containers:
            for parent in container.get("dependencies", []):
                nodes.connect(self.nodes[parent], self.nodes[container["name"]])
            if not container.get("dependencies"):
                nodes.connect(node, self.nodes[container["name"]])

    async def _container(self, container: Mapping[str, Any]) -> None:
        name = container["name"]
        for dependency in container.get("dependencies", []):
            await self._ended_or_failed(dependency)
            if dependency not in self.codes and not self._follows_failure(name):
                self._end(name, Ended(STOPPED))
                return
            await self.ended[dependency].wait()
            if self.codes[dependency] != 0:
                why = f'dependency "{dependency}" exited with non-zero code: {self.codes[dependency]}'
                self._end(name, Ended(DEPENDENCY_FAILED, why=why))
                return
        if self.stopped is not None or self.failed.is_set():
            self._end(name, Ended(STOPPED))
            return
        self.workflow.emit(EventKind.NODE_STARTED, self.nodes[name])
        ended = await self._attempts(container)
        self.stopped = ended.stopped or self.stopped
        self._end(name, ended)

    def _end(self, name: str, ended: Ended) -> None:
        code = self.codes[name] = ended.code
        if code != 0:
            self.failed.set()
        phase = Phase.SUCCEEDED if code == 0 else Phase.ERROR if code == DEPENDENCY_FAILED else Phase.FAILED
        self.workflow.nodes.mark(self.nodes[name], phase, f"{name}: {ended.message}" if code else "")
        self.workflow.emit(EventKind.NODE_FINISHED, self.nodes[name])
        self.ended[name].set()

    async def _ended_or_failed(self, name: str) -> None:
        """Returns when that container has ended, or any has failed."""
        waits = {asyncio.create_task(event.wait()) for event in (self.ended[name], self.failed)}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _follows_failure(self, name: str) -> bool:
        """Whether one that it depends on, at any distance, has failed."""
        depends = next(c.get("dependencies", []) for c in self.containers if c["name"] == name)
        return any(self.codes.get(d, 0) != 0 or self._follows_failure(d) for d in depends)

    async def _attempts(self, container: Mapping[str, Any]) -> Ended:
        """A retry runs the one container again, whatever its exit code, in the file system as it is."""
        left = int(self.retries.get("retries", 0))
        while True:
            ended = await self.pod.run_container(container, container["name"], abandoned=self.failed)
            if ended.code == 0 or ended.stopped is not None or left == 0 or self.failed.is_set():
                return ended
            left -= 1
            await self.workflow.pause(seconds(self.retries.get("duration", 0)), self.pod.frame.on_exit)
            if self.workflow.refusal_to_start(self.pod.frame.on_exit) is not None:
                return ended
