"""The process that a step's process is a child of: `python -P parent.py MODULE,MODULE,... RUN_MODULE [ROOTS...]`.

It imports MODULEs once, then starts one child per request of the interpreter, over the unix socket that is its stdin:
either `exec` (fork and execve) or `fork` (fork and call RUN_MODULE.main(argv), which costs no interpreter start and
no imports). It is single-threaded, so that forking is safe, and it never does work of its own.

Requests and answers are JSON in one datagram (SOCK_SEQPACKET). A start carries three descriptors: stdout, stderr, and an
unlinked file with {"argv": [...], "environment": {...}, "directory": "..."}, because a datagram is too small for them.
    {"do": "start", "id": 1, "how": "exec"|"fork"}
    {"do": "signal", "id": 1, "number": 15}
    {"ready": true} {"id": 1, "pid": 4711} {"id": 1, "failed": "..."} {"id": 1, "exit": 143}

Of the tens of milliseconds that a forked stage costs, little is waited for. A spare child is forked with each start, for
the next one; while it waits it calls RUN_MODULE.rehearse(), if there is one, so that the memory pages which every stage
writes are its own already. At the end a child says its exit code itself, and its group is killed on that: giving back the
memory of all those imports takes longer than many a request.

Nothing survives: each child leads a session; when it ends, its group is killed, as when a container ends. When the
socket closes (the interpreter ended, also by SIGKILL) every descendant is killed. When this process itself is killed,
the kernel kills its children (PR_SET_PDEATHSIG). Start it with `-P` or `-I`: it must not import what lies beside it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
import weakref
from itertools import pairwise
from typing import Any, NoReturn

MAX_MESSAGE_BYTES = 1 << 16
STARTED = b"started"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _prctl(option: int, value: int) -> None:
    if _libc is not None:
        _libc.prctl(option, value, 0, 0, 0)


class Child:
    """A forked process that waits for the command to run. Its connection closes with execve."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self.connection = pid, connection

    def begin(self, how: str, descriptors: list[int]) -> bool:
        try:
            socket.send_fds(self.connection, [how.encode()], descriptors)
        except (BrokenPipeError, ConnectionResetError):
            self.connection.close()
            return False
        return True

    def failure(self) -> str | None:
        """Why the program could not start; None once it runs."""
        try:
            said = self.connection.recv(MAX_MESSAGE_BYTES)
        except ConnectionResetError:
            said = b""  # killed before it read the command: how it ended is all that there is to say
        return None if said in (b"", STARTED) else said.decode()


class Parent:
    def __init__(self, connection: socket.socket, run_module: str) -> None:
        self.connection = connection
        self.run_module = run_module
        self.pids: dict[int, int] = {}
        self.said: dict[int, tuple[int, socket.socket]] = {}  # by descriptor: which child says its exit code there
        self.spare: Child | None = None  # forked before anyone asked, so that nobody waits for it
        self.poll = select.poll()
        self.wakeup_read, self.wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wakeup_write, warn_on_full_buffer=False)
        # A Ctrl-C or a stop reaches the interpreter, which decides what its children get.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)

    def serve(self) -> None:
        self.answer({"ready": True})
        self.poll.register(self.connection, select.POLLIN)
        self.poll.register(self.wakeup_read, select.POLLIN)
        while True:
            for descriptor, _ in self.poll.poll():
                if descriptor in self.said:
                    self.hear(descriptor)
                elif descriptor == self.wakeup_read:
                    while _drained(self.wakeup_read):
                        pass
                    self.reap()
                elif not self.handle():
                    return

    def handle(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self.connection, MAX_MESSAGE_BYTES, 3)
        if not data:
            return False
        request = json.loads(data)
        if request["do"] == "start":
            self.start(request, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        elif (pid := self.pids.get(request["id"])) is not None:
            _kill_group(pid, request["number"])
        return True

    def start(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """Answers only when the program runs, or with the reason why it cannot."""
        child = None
        if request["how"] == "fork":
            child, self.spare = self.spare, None
            if child is not None and not child.begin(request["how"], descriptors):
                child = None  # it was killed while it waited
        if child is None:
            child = self.fork()
            child.begin(request["how"], descriptors)
        if (reason := child.failure()) is not None:
            child.connection.close()
            os.waitpid(child.pid, 0)
            self.answer({"id": request["id"], "failed": reason})
        else:
            self.pids[request["id"]] = child.pid
            self.said[child.connection.fileno()] = (request["id"], child.connection)
            self.poll.register(child.connection, select.POLLIN)
            self.answer({"id": request["id"], "pid": child.pid})
        if request["how"] == "fork":
            self.spare = self.fork()

    def fork(self) -> Child:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.child(theirs, parent)
        theirs.close()
        return Child(pid, ours)

    def child(self, connection: socket.socket, parent: int) -> NoReturn:
        """Runs in the forked child; `connection` is all that it has of its parent."""
        command: dict[str, Any] = {"argv": [self.run_module]}
        try:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(137)
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            self.connection.close()
            for first, last in pairwise((2, connection.fileno(), 1024)):
                os.closerange(first + 1, last)
            _rehearse(self.run_module)
            how, descriptors, _, _ = socket.recv_fds(connection, 16, 3)
            with open(descriptors[2], "rb") as file:
                command = json.load(file)
            os.chdir(command["directory"])
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (descriptors[0], 1), (descriptors[1], 2)):
                os.dup2(source, target)
                os.close(source)
            if how == b"exec":
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it; a program must not inherit that
                os.execvpe(command["argv"][0], command["argv"], command["environment"])
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.clear()
            os.environ.update(command["environment"])
            connection.send(STARTED)
        except BaseException as error:
            connection.send(f"{command['argv'][0]}: {error}".encode())
            os._exit(64)
        code = _run(self.run_module, command["argv"])
        connection.send(bytes([code]))
        os._exit(code)

    def hear(self, descriptor: int) -> None:
        """A child has said its exit code, or its connection closed without: then `reap` will know it."""
        number, connection = self.said.pop(descriptor)
        self.poll.unregister(descriptor)
        with connection:
            code = connection.recv(1)
        if code and (pid := self.pids.pop(number, None)) is not None:
            _kill_group(pid, signal.SIGKILL)
            self.answer({"id": number, "exit": code[0]})

    def reap(self) -> None:
        ids = {pid: number for number, pid in self.pids.items()}
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in ids:  # before the pid is free again
                _kill_group(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            code = os.waitstatus_to_exitcode(status)
            if ended.si_pid in ids:
                number = ids[ended.si_pid]
                del self.pids[number]
                self.answer({"id": number, "exit": 128 - code if code < 0 else code})

    def answer(self, message: dict[str, Any]) -> None:
        try:
            self.connection.send(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            self.end()

    def end(self) -> NoReturn:
        """Kills every descendant, those that left their group included, until none is left."""
        while True:
            for pid in _descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                os._exit(0)


def _rehearse(module: str) -> None:
    """MODULE.rehearse(), if there is one. It changes nothing but memory pages; what fails here fails again in the run."""
    rehearse = getattr(sys.modules.get(module), "rehearse", None)
    if rehearse is not None:
        with contextlib.suppress(Exception):
            rehearse()


def _run(module: str, argv: list[str]) -> int:
    """Calls MODULE.main as `python -m` would, and gives the exit code that the process would have had.

    The interpreter isn't finalised (that would touch, and so copy, every page that the imports made); what a program
    can notice of it is done by hand: its threads are joined, its exit functions run, its output is flushed.
    """
    sys.argv = [module, *argv]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        code = importlib.import_module(module).main(argv)
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120
    return 0 if code is None else int(code) & 0xFF


def _kill_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _drained(descriptor: int) -> bool:
    try:
        return len(os.read(descriptor, 4096)) > 0
    except BlockingIOError:
        return False


def _descendants(root: int) -> list[int]:
    """Pids below `root`, from /proc (elsewhere only the groups of the children are known)."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as stat:
                    ppid = int(stat.read().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(ppid, []).append(int(name))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def main() -> None:
    modules, run_module, *roots = sys.argv[1:]
    sys.path[:0] = roots
    connection = socket.socket(fileno=os.dup(0))
    os.set_inheritable(connection.fileno(), False)
    for module in filter(None, modules.split(",")):
        importlib.import_module(module)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # the imports tidy up at the end: of each child too, and for torch that is 50 ms
    gc.collect()
    gc.freeze()  # a child's collections then don't touch, and so copy, what the imports made
    parent = Parent(connection, run_module)
    parent.serve()
    parent.end()


if __name__ == "__main__":
    main()
