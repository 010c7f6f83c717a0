"""Stopping: signals, deadlines, and that nothing survives the interpreter."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from colchis.workflows.local.interpreter import WorkflowResult
from tests.interpreter.machine import (
    LAUNCHERS,
    TOYS,
    alive,
    container,
    machine,
    processes_with,
    toy,
    until,
    workflow,
)
from tests.waiting import eventually

BOTH = pytest.mark.parametrize("kind", ["exec", "warm"])


def ready(work_dir: Path) -> Path | None:
    return next(iter(work_dir.rglob("ready")), None)


@BOTH
@pytest.mark.parametrize(("what", "code"), [(["trap", "0"], "0"), (["sleep", "60"], "143"), (["ignore"], "137")])
def test_stop_is_term_then_grace_then_kill(kind: str, what: list[str], code: str, tmp_path: Path) -> None:
    """Catches a stage that isn't asked first, one that is never killed, and a stop that counts as a success."""

    async def go() -> WorkflowResult:
        async with machine(tmp_path, LAUNCHERS[kind](), grace_s=0.5) as (interpreter, _):
            running = asyncio.create_task(interpreter.run(workflow(container(toy(*what)))))
            started = tmp_path / "w"
            await until(lambda: bool(ready(tmp_path) or any(p.read_text() for p in started.rglob("stdout.log"))))
            interpreter.stop()
            return await asyncio.wait_for(running, 30)

    result = asyncio.run(go())
    assert (result.phase, result.message) == ("Failed", "Stopped with strategy 'Stop'")
    node = result.nodes["w"]
    assert node["message"] == "workflow shutdown with strategy: Stop"
    assert node["outputs"]["exitCode"] == code


@pytest.mark.parametrize(("how", "handled"), [("stop", True), ("terminate", False)])
def test_stop_runs_the_exit_handler_and_terminate_does_not(how: str, handled: bool, tmp_path: Path) -> None:
    """Catches an exit handler that is stopped itself, and steps or successors that start after a stop."""
    chain = {
        "name": "main",
        "steps": [
            [{"name": "long", "template": "long"}],
            [{"name": "next", "template": "successor"}],
        ],
    }
    long = {**container(toy("trap", "0")), "name": "long"}
    successor = {
        "name": "successor",
        "resource": {"action": "create", "manifest": "kind: Workflow\nmetadata: {name: w2}\nspec: {}"},
    }
    bye = {**container(["python3", "-c", "print('bye')"]), "name": "bye"}

    async def go() -> WorkflowResult:
        async with machine(tmp_path) as (interpreter, _):
            running = asyncio.create_task(interpreter.run(workflow(chain, long, successor, bye, onExit="bye")))
            await until(lambda: ready(tmp_path) is not None)
            getattr(interpreter, how)()
            return await asyncio.wait_for(running, 30)

    result = asyncio.run(go())
    names = {node["name"]: node["phase"] for node in result.nodes.values()}
    assert names["w[0].long"] == "Failed"
    assert "w[1]" not in names
    assert names.get("w.onExit") == ("Succeeded" if handled else None)
    assert result.predecessors == ()


def test_stop_drops_outputs_and_a_default_takes_their_place(tmp_path: Path) -> None:
    """Catches a local run that relies on outputs written on SIGTERM: a controller does not collect them."""
    code = (
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    open('{{outputs.parameters.o.path}}', 'w').write('late'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save); pathlib.Path('ready').touch()\n"
        "for _ in range(1200): time.sleep(0.05)"
    )
    outputs = {"parameters": [{"name": "o", "valueFrom": {"path": "/tmp/o", "default": "DEFAULT"}}]}

    async def go() -> WorkflowResult:
        async with machine(tmp_path) as (interpreter, _):
            running = asyncio.create_task(
                interpreter.run(workflow(container(["python3", "-c", code], outputs=outputs)))
            )
            await until(lambda: ready(tmp_path) is not None)
            interpreter.stop()
            return await asyncio.wait_for(running, 30)

    assert asyncio.run(go()).nodes["w"]["outputs"]["parameters"] == [{"name": "o", "value": "DEFAULT"}]


def test_stop_ends_a_backoff(tmp_path: Path) -> None:
    """Catches a stop that waits for the next attempt of a retry."""
    retry = {"limit": "3", "backoff": {"duration": "10m"}}

    async def go() -> tuple[WorkflowResult, float]:
        async with machine(tmp_path) as (interpreter, events):
            template = container(["python3", "-c", "raise SystemExit(75)"], retryStrategy=retry)
            running = asyncio.create_task(interpreter.run(workflow(template)))
            await until(lambda: any(event.phase == "Failed" for event in events))
            await asyncio.sleep(0.1)
            before = time.monotonic()
            interpreter.stop()
            return await asyncio.wait_for(running, 30), time.monotonic() - before

    result, waited_s = asyncio.run(go())
    assert result.phase == "Failed"
    assert waited_s < 10


def test_a_cancelled_run_ends_its_processes(tmp_path: Path) -> None:
    """Catches a process that outlives the task that interprets its workflow."""

    async def go() -> list[int]:
        async with machine(tmp_path, grace_s=0.5) as (interpreter, _):
            running = asyncio.create_task(interpreter.run(workflow(container(toy("ignore")))))
            await until(lambda: ready(tmp_path) is not None)
            pids = processes_with(str(tmp_path))
            assert pids
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            return [pid for pid in pids if alive(pid)]

    assert asyncio.run(go()) == []


def test_a_deadline_without_an_answer_is_a_kill(tmp_path: Path) -> None:
    """Catches a stage that ignores SIGTERM and so passes its deadline for good."""

    async def go() -> WorkflowResult:
        async with machine(tmp_path, grace_s=0.3) as (interpreter, _):
            template = container(toy("ignore"), activeDeadlineSeconds=1)
            return await asyncio.wait_for(interpreter.run(workflow(template)), 30)

    node = asyncio.run(go()).nodes["w"]
    assert node["phase"] == "Failed"
    assert node["message"] == "Pod was active on the node longer than the specified deadline"
    assert "exitCode" not in node.get("outputs", {})


INTERPRET = """
import asyncio, sys
from pathlib import Path
from tests.interpreter.machine import LAUNCHERS, machine, toy, container, workflow

async def main():
    async with machine(Path(sys.argv[2]), LAUNCHERS[sys.argv[1]]()) as (interpreter, _):
        await interpreter.run(workflow(container(toy("descend", sys.argv[3]))))

asyncio.run(main())
"""


@BOTH
@pytest.mark.parametrize("how", ["group-stay", "session-stay"])
def test_nothing_survives_a_kill_9_of_the_interpreter(kind: str, how: str, tmp_path: Path) -> None:
    """Catches children, their children and parents of the launcher that are left when the interpreter is killed."""
    mark = f"mark-{uuid.uuid4().hex}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", ".", str(TOYS)]), "MARK": mark}
    interpreter = subprocess.Popen(
        [sys.executable, "-c", INTERPRET, kind, str(tmp_path / mark), how], env=environment, start_new_session=True
    )
    try:
        eventually(lambda: ready(tmp_path) is not None, "the toy is ready")
        grandchild = int(next(tmp_path.rglob("pid")).read_text())
        assert alive(grandchild)
        assert len(processes_with(mark)) >= 4  # interpreter, parent, stage, what the stage started
        os.killpg(interpreter.pid, signal.SIGKILL)
        interpreter.wait()
        eventually(lambda: not processes_with(mark) and not alive(grandchild), "none of its processes is left")
    finally:
        for pid in processes_with(mark):
            os.kill(pid, signal.SIGKILL)


def test_stop_starts_no_further_container_of_a_set(tmp_path: Path) -> None:
    """Catches boundary after boundary of a reload that still runs after a stop, because the first one ended well."""
    first = {"name": "first", "image": "none", "command": toy("trap", "0")}
    then = {"name": "main", "image": "none", "command": ["touch", "{{workflow.name}}-ran"], "dependencies": ["first"]}
    template = {"name": "main", "containerSet": {"containers": [first, then]}}

    async def go() -> WorkflowResult:
        async with machine(tmp_path) as (interpreter, _):
            running = asyncio.create_task(interpreter.run(workflow(template)))
            await until(lambda: ready(tmp_path) is not None)
            interpreter.stop()
            return await asyncio.wait_for(running, 30)

    nodes = {node["name"]: node for node in asyncio.run(go()).nodes.values()}
    assert not list(tmp_path.rglob("w-ran"))
    assert (nodes["w"]["phase"], nodes["w"]["message"]) == ("Failed", "workflow shutdown with strategy: Stop")
    assert nodes["w.main"]["message"] == "main: Error (exit code 143)"


def test_a_stop_before_the_start_is_a_stop(tmp_path: Path) -> None:
    """Catches a Ctrl-C that is lost because nothing ran yet."""

    async def go() -> WorkflowResult:
        async with machine(tmp_path) as (interpreter, _):
            interpreter.stop()
            return await asyncio.wait_for(interpreter.run(workflow(container(toy("sleep", "60")))), 30)

    result = asyncio.run(go())
    assert (result.phase, result.message) == ("Failed", "Stopped with strategy 'Stop'")
    assert not list(tmp_path.rglob("command.json"))
