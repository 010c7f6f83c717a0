"""The folder where a laptop keeps its store, logs and step folders: `.colchis`, or $COLCHIS_HOME."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colchis.components.errors import BadConfig
from colchis.components.store import Store, StoreSettings
from colchis.workflows.local.services import write_state
from colchis.workflows.local.weed import Weed


@dataclass(frozen=True)
class Home:
    """Paths below the home folder."""

    folder: Path

    @classmethod
    def find(cls) -> Home:
        return cls(Path(os.environ.get("COLCHIS_HOME") or ".colchis").resolve())

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

    def make(self) -> None:
        """Make the folder, unless it is there. BadConfig when that cannot be."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise BadConfig(
                f"cannot be the home folder: {e.strerror}",
                where=str(self.folder),
                hint="set COLCHIS_HOME to a folder that can be made here",
            ) from e

    @contextmanager
    def locked(self, purpose: str) -> Iterator[None]:
        """Only one process owns the services of a home. BadConfig says which one does."""
        self.make()
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
        """Process, environment and kind of the services that a process of this machine runs for this home, if any.

        BadConfig when the file that says so is damaged.
        """
        try:
            state: dict[str, Any] = json.loads(self.services.read_text(encoding="utf-8"))
            pid, since, _, _ = (state[name] for name in ("pid", "since", "kept", "environment"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, TypeError, KeyError) as e:
            raise BadConfig(
                f"cannot be read ({type(e).__name__}: {e})",
                where=str(self.services),
                hint="remove it; what runs for this home ends with the process that started it",
            ) from None
        return state if started_at(pid) == since else None

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
        pid = os.getpid()
        state = {"pid": pid, "since": started_at(pid), "kept": kept, "environment": dict(environment)}
        write_state(self.services, state)
        try:
            yield
        finally:
            self.services.unlink(missing_ok=True)


def started_at(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; None when there is none. Tells it from a later one of its number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


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
