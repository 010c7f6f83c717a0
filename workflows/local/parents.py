"""Launchers that start steps through parent processes (parent.py): plain exec, or forked from warm ones.

`ExecLauncher` is the reference: every step is a new process of the command that its template names. `WarmLauncher` runs
stages (`python -m colchis.components STAGE ...`) as forks of a parent that has already imported what the stage needs,
which takes some 20 ms instead of seconds; every other command goes the plain way. Both give the same exit codes, output
and signals. Linux only (process groups that die with their parent need prctl).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from colchis.components.errors import BadConfig, Bug
from colchis.workflows.local.launcher import CannotStart, Command, Process

PARENT = Path(__file__).with_name("parent.py")
START_DEADLINE_S = 120.0  # for the imports of a warm parent, on a loaded machine
SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # Arrow's allocator starts a thread on import
}


@dataclass(frozen=True)
class Warm:
    """What a parent imports before it forks."""

    name: str
    modules: tuple[str, ...]


_IMPORTED_AT_FIRST_USE = (
    *("httpcore", "httpcore._backends.anyio", "anyio._backends._asyncio", "h11", "encodings.idna"),  # by httpx
    *("numpy.ctypeslib", "numpy.random", "numpy.ma", "resource"),
)
"""Modules that libraries import when they are first needed, which every forked stage would pay for again."""

_STAGES = ("begin", "rollout", "grade", "batch", "train", "reload", "evaluate", "close")
TORCH_FREE = Warm(
    "torch-free",
    (
        "colchis.components.__main__",
        "colchis.components.store.warm",
        *(f"colchis.components.stages.{stage}" for stage in _STAGES),
        *_IMPORTED_AT_FIRST_USE,
    ),
)
TORCH = Warm(
    "torch",
    (
        *TORCH_FREE.modules,
        "colchis.components.trainer",
        "torch",
        "transformers",
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.qwen3.modeling_qwen3",
    ),
)
STAGES_WITH_TORCH = frozenset({"train"})
STAGE_MODULE = "colchis.components"


class ParentProcess:
    """One parent process; started by the first command, and again if it should die."""

    def __init__(self, warm: Warm, run_module: str = "", roots: Sequence[Path] = ()) -> None:
        self.warm, self.run_module, self.roots = warm, run_module, roots
        self._process: asyncio.subprocess.Process | None = None
        self._connection: socket.socket | None = None
        self._ready: asyncio.Future[None] | None = None
        self._starting = asyncio.Lock()
        self._sending = asyncio.Lock()
        self._children: dict[int, _Child] = {}
        self._next = 0

    async def start(self, how: str, command: Command) -> Process:
        connection = await self.connected()
        self._next += 1
        child = _Child(self, self._next)
        self._children[child.id] = child
        with (
            tempfile.TemporaryFile() as file,
            open(command.stdout, "ab") as stdout,
            open(command.stderr, "ab") as stderr,
        ):
            content = {
                "argv": command.argv,
                "environment": dict(command.environment),
                "directory": str(command.directory),
            }
            file.write(json.dumps(content).encode())
            file.flush()
            file.seek(0)
            request = {"do": "start", "id": child.id, "how": how}
            async with self._sending:
                await _send(connection, request, [stdout.fileno(), stderr.fileno(), file.fileno()])
        try:
            await asyncio.shield(child.started)
        except asyncio.CancelledError:
            child.started.add_done_callback(lambda _: child.signal(signal.SIGKILL))
            raise
        return child

    async def connected(self) -> socket.socket:
        """The socket of a parent that has made its imports; starts one when there is none."""
        async with self._starting:
            if self._connection is None:
                await self._launch()
            assert self._connection is not None
            assert self._ready is not None
            try:
                async with asyncio.timeout(START_DEADLINE_S):
                    await asyncio.shield(self._ready)
            except TimeoutError as error:
                raise Bug(
                    f"the {self.warm.name} parent process did not get ready in {START_DEADLINE_S:.0f} s",
                    where=str(PARENT),
                    hint="import its modules by hand to see which one hangs",
                ) from error
            return self._connection

    async def _launch(self) -> None:
        if sys.platform != "linux":
            raise BadConfig(
                "a local run ends its processes by means that only Linux has (PR_SET_PDEATHSIG, /proc)",
                where=sys.platform,
                hint="use a Linux machine, WSL or a container",
            )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        roots = [str(root) for root in self.roots]
        with theirs:
            # A session of its own: a SIGKILL to the interpreter's whole group leaves it alive to end its children.
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", str(PARENT), ",".join(self.warm.modules), self.run_module, *roots),
                stdin=theirs.fileno(),
                start_new_session=True,
                env={**os.environ, **SINGLE_THREADED},
            )
        self._connection = ours
        self._ready = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(ours, self._receive, ours)

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._lost(connection)
            return
        message = json.loads(data)
        if "ready" in message:
            assert self._ready is not None
            self._ready.set_result(None)
            return
        child = self._children[message["id"]]
        if "pid" in message:
            child.pid = message["pid"]
            child.started.set_result(None)
        elif "failed" in message:
            del self._children[child.id]
            child.started.set_exception(CannotStart(message["failed"]))
        else:
            del self._children[child.id]
            child.ended.set_result(message["exit"])

    def _lost(self, connection: socket.socket) -> None:
        """The parent ended, and with it its children: they count as killed."""
        asyncio.get_running_loop().remove_reader(connection)
        connection.close()
        self._connection = None
        error = Bug(
            f"the {self.warm.name} parent process ended before it could start a command",
            where=", ".join(self.warm.modules) or None,
            hint="its error is on stderr above; `--exec` runs without warm parents",
        )
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # seen: a parent that is not needed any more may have nobody who waits for it
        for child in self._children.values():
            if not child.started.done():
                child.started.set_exception(error)
            elif not child.ended.done():
                child.ended.set_result(137)
        self._children.clear()

    def signal(self, child: int, number: int) -> None:
        if self._connection is not None and child in self._children:
            self._connection.send(json.dumps({"do": "signal", "id": child, "number": number}).encode())

    async def close(self) -> None:
        """Ends the parent, which kills every child that is left, and waits for it."""
        if self._connection is not None:
            self._lost(self._connection)
        if self._process is not None:
            await self._process.wait()


class _Child:
    def __init__(self, parent: ParentProcess, number: int) -> None:
        self.id, self.parent, self.pid = number, parent, 0
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)

    def signal(self, number: signal.Signals) -> None:
        self.parent.signal(self.id, number)


async def _send(connection: socket.socket, message: dict[str, object], descriptors: list[int]) -> None:
    data = json.dumps(message).encode()
    while True:
        try:
            socket.send_fds(connection, [data], descriptors)
            return
        except BlockingIOError:
            loop = asyncio.get_running_loop()
            writable: asyncio.Future[None] = loop.create_future()
            loop.add_writer(connection, writable.set_result, None)
            try:
                await writable
            finally:
                loop.remove_writer(connection)


def _with_interpreter(command: Command) -> Command:
    """`python` and `python3` are the interpreter that runs us: the packages of the image are those of this one."""
    if command.argv and command.argv[0] in ("python", "python3"):
        return replace(command, argv=(sys.executable, *command.argv[1:]))
    return command


class ExecLauncher:
    """Each step is a new process: what a pod does."""

    def __init__(self) -> None:
        self._parent = ParentProcess(Warm("plain", ()))

    async def start(self, command: Command) -> Process:
        return await self._parent.start("exec", _with_interpreter(command))

    async def close(self) -> None:
        await self._parent.close()


class WarmLauncher:
    """Stages are forks of a parent that holds their imports; everything else is executed.

    `stages` names the parent of a stage where it is not the torch-free one. `module` is what `python -m` names in the
    commands that are forked (its `__main__.main(argv)` is called), `roots` are import roots for it.
    """

    def __init__(
        self,
        *,
        default: Warm = TORCH_FREE,
        stages: Mapping[str, Warm] = dict.fromkeys(STAGES_WITH_TORCH, TORCH),
        module: str = STAGE_MODULE,
        roots: Sequence[Path] = (),
    ) -> None:
        self._module = module
        self._stages = stages
        self._plain = ParentProcess(Warm("plain", ()))
        self._default = default
        self._warm = {warm: ParentProcess(warm, f"{module}.__main__", roots) for warm in {default, *stages.values()}}
        self._warming: list[asyncio.Task[socket.socket]] = []

    def warm_for(self, argv: Sequence[str]) -> Warm | None:
        """The imports that a command is forked with; None when it is executed."""
        if len(argv) < 3 or tuple(argv[:3]) not in (("python", "-m", self._module), ("python3", "-m", self._module)):
            return None
        return self._stages.get(argv[3], self._default) if len(argv) > 3 else self._default

    async def start(self, command: Command) -> Process:
        warm = self.warm_for(command.argv)
        if warm is None:
            return await self._plain.start("exec", _with_interpreter(command))
        if not self._warming:  # all of them, with the first stage: their imports take seconds
            self._warming = [asyncio.create_task(parent.connected()) for parent in self._warm.values()]
        return await self._warm[warm].start("fork", replace(command, argv=command.argv[3:]))

    async def close(self) -> None:
        for task in self._warming:
            task.cancel()
        await asyncio.gather(*self._warming, return_exceptions=True)
        await asyncio.gather(self._plain.close(), *(parent.close() for parent in self._warm.values()))
