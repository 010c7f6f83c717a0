"""The folder where a laptop keeps its store, logs and step folders: `.colchis`, or $COLCHIS_HOME."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colchis.components.errors import BadConfig, PeerUnavailable
from colchis.components.store import Store, StoreSettings
from colchis.workflows.local.services import write_state
from colchis.workflows.local.weed import Weed


@dataclass(frozen=True)
class Home:
    """Paths below the home folder."""

    folder: Path

    @classmethod
    def find(cls) -> Home:
        return cls(Path(os.environ.get("COLCHIS_HOME", ".colchis")).resolve())

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def pools(self) -> Path:
        return self.folder / "pools"

    @property
    def services(self) -> Path:
        """Addresses and credentials of the services that run now."""
        return self.folder / "services.json"

    def run_folder(self, run: str) -> Path:
        return self.folder / "runs" / run

    @contextmanager
    def locked(self, purpose: str) -> Iterator[None]:
        """Only one process owns the services of a home. BadConfig says which one does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "lock"
        with path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise BadConfig(
                    f"{self.folder} is in use by {file.read().strip() or 'another process'}",
                    hint="stop it, wait for it, or set COLCHIS_HOME to another folder",
                ) from None
            file.truncate(0)
            file.write(f"process {os.getpid()} ({purpose})")
            file.flush()
            yield

    def is_locked(self) -> bool:
        """Whether a process owns the services of this home, also while it ends them."""
        path = self.folder / "lock"
        if not path.exists():
            return False
        with path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def state(self) -> dict[str, Any] | None:
        """Process, environment and kind of the services that a process of this machine runs for this home, if any."""
        try:
            state: dict[str, Any] = json.loads(self.services.read_text(encoding="utf-8"))
            os.kill(state["pid"], 0)
        except (FileNotFoundError, ProcessLookupError):
            return None
        return state

    def running(self) -> dict[str, str] | None:
        """Environment of the services that run now, for commands that look."""
        state = self.state()
        return state["environment"] if state else None

    def kept(self) -> dict[str, str] | None:
        """Environment of the services that `colchis up` keeps, for commands that run on them."""
        state = self.state()
        return state["environment"] if state and state["kept"] else None

    @contextmanager
    def announced(self, environment: Mapping[str, str], *, kept: bool) -> Iterator[None]:
        """Let commands in other terminals find the services while they run."""
        write_state(self.services, {"pid": os.getpid(), "kept": kept, "environment": dict(environment)})
        try:
            yield
        finally:
            self.services.unlink(missing_ok=True)


@contextmanager
def start_store(home: Home) -> Iterator[Store]:
    """SeaweedFS on the home's data. The caller holds the home's lock."""
    with Weed(home.store) as weed:
        yield Store(weed.settings)


@contextmanager
def open_store(home: Home) -> Iterator[Store]:
    """The store to look at: the one in the environment, the one running for this home, or the home's data, started for
    as long as it takes."""
    if os.environ.get("COLCHIS_S3_ENDPOINT"):
        yield Store(StoreSettings.from_environment())
        return
    environment = home.running()
    if environment is not None:
        yield Store(StoreSettings.from_environment(environment))
        return
    if not home.store.exists():
        raise BadConfig(
            f"no store: {home.store} does not exist and COLCHIS_S3_ENDPOINT is not set",
            hint="start a run with `colchis run CONFIG`, or set the COLCHIS_S3_* variables",
        )
    with home.locked("colchis, reading"), start_store(home) as store:
        yield store


def wait_for_services(home: Home, deadline_s: float = 180.0) -> dict[str, str]:
    """The environment of services that another process is starting. PeerUnavailable past the deadline."""
    end = time.monotonic() + deadline_s
    while (environment := home.running()) is None:
        if time.monotonic() > end:
            raise PeerUnavailable(f"the services of {home.folder} did not start within {deadline_s:g} s")
        time.sleep(0.1)
    return environment
