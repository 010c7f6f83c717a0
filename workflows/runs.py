"""Starting and steering runs: what `colchis run`, `stop` and `skip` do."""

from __future__ import annotations

import asyncio
import getpass
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from colchis.components.config import RunConfig, TrainerConfig
from colchis.components.errors import BadConfig, BadData
from colchis.components.records.run import StopWish
from colchis.components.report import find_summary, known_run
from colchis.components.store import Attempt, Lease, StageKey, Store, StoreSettings, find_commit, keys
from colchis.workflows.home import Home, start_store
from colchis.workflows.local.calls import Event
from colchis.workflows.local.interpreter import Interpreter, WorkflowResult
from colchis.workflows.local.launcher import Launcher
from colchis.workflows.local.parents import ExecLauncher, WarmLauncher
from colchis.workflows.local.services import Pool, start_pool
from colchis.workflows.render import read_templates
from colchis.workflows.request import pin_files, workflow

RUN_LEASE_S = 20.0
"""A runner that was killed holds its run for so long; a living one renews six times in that time."""


@dataclass(frozen=True)
class LocalRun:
    """What `colchis run` needs to know."""

    config: RunConfig
    source: Path
    run: str
    pool: str | None
    engines: int | None
    kind: str | None
    """None for pool, engines and kind: whatever is up, else the defaults of `services`."""
    shape: str
    exec_: bool
    manifests: Path


def model_folder(config: RunConfig, source: Path) -> Path | None:
    """The local folder of the base model, for engines that want it at start."""
    if not config.model.source.startswith("file:"):
        return None
    return (source.resolve().parent / config.model.source.removeprefix("file:")).resolve()


def run_locally(
    run: LocalRun,
    home: Home,
    *,
    on_event: Callable[[Event], None],
    on_store: Callable[[Store], None],
    on_end: Callable[[Store, WorkflowResult], None],
) -> WorkflowResult:
    """Interpret the rendered manifests to the end of the run, on services that are kept up or on its own. `on_store` and
    `on_end` are called while these are up."""
    templates = read_templates(run.manifests)
    model = model_folder(run.config, run.source)
    purpose, trainer = f"colchis run {run.run}", run.config.trainer
    with services(home, purpose, run.pool, run.engines, run.kind, model=model, trainer=trainer) as (store, pool):
        config = pin_files(run.config, run.source, store)
        with held_run(store, run.run):
            on_store(store)
            result = asyncio.run(_interpret(run, config, home, templates, store, pool, on_event))
        on_end(store, result)
        return result


@contextmanager
def services(
    home: Home,
    purpose: str,
    pool_name: str | None = None,
    engines: int | None = None,
    kind: str | None = None,
    *,
    model: Path | None = None,
    trainer: TrainerConfig | None = None,
    keep: bool = False,
) -> Iterator[tuple[Store, Pool]]:
    """Store and pool: those that `colchis up` keeps for this home, or new ones for as long as the block lasts.

    BadConfig when what is kept is not what was asked for. `keep` announces them as kept: other commands may run on them.
    """
    kept = home.kept()
    if kept is not None and not keep:
        pool_name = _fitting(kept, {"pool": pool_name, "engines": engines, "engine": kind}, home)
        pool = Pool(pool_name, [], kept["COLCHIS_ENGINES"], kept["COLCHIS_AGENT_TOKEN"])
        yield Store(StoreSettings.from_environment(kept)), pool
        return
    pool_name, engines, kind = pool_name or "main", engines or 2, kind or "embedded"
    kept_as = {"COLCHIS_KEPT_POOL": pool_name, "COLCHIS_KEPT_ENGINES": str(engines), "COLCHIS_KEPT_ENGINE": kind}
    with home.locked(purpose), start_store(home) as store:
        # The home's lock proves that no run uses the pools of this home.
        store.delete(keys.pool_lease(pool_name))
        with (
            start_pool(
                pool_name,
                replicas=engines,
                kind=kind,
                folder=home.pools,
                store_environment=store.settings.to_environment(),
                model=model,
                trainer=trainer,
            ) as pool,
            home.announced({**store.settings.to_environment(), **pool_environment(pool), **kept_as}, kept=keep),
        ):
            yield store, pool


def _fitting(kept: Mapping[str, str], asked: Mapping[str, object], home: Home) -> str:
    """The name of the pool that is up. BadConfig when it is not what was asked for; None asks for nothing."""
    keys_of = {name: f"COLCHIS_KEPT_{name.upper()}" for name in asked}
    there = {name: kept[key] for name, key in keys_of.items() if key in kept}
    other = [
        f"--{name} {value}" for name, value in asked.items() if value and str(value) != there.get(name, str(value))
    ]
    if other:
        raise BadConfig(
            f"{', '.join(other)}: what is up is {', '.join(f'{name} {value}' for name, value in there.items())}",
            where=str(home.folder),
            hint="leave it out, or `colchis down` first",
        )
    return there.get("pool") or str(asked["pool"] or "main")


def run_secrets(store: Store, pool: Pool) -> dict[str, dict[str, str]]:
    """The Secret and the ConfigMap that the templates name, as a cluster's overlay would provide them."""
    s = store.settings
    return {
        "colchis-store": {
            "endpoint": s.endpoint,
            "bucket": s.bucket,
            "region": s.region,
            "accessKey": s.access_key,
            "secretKey": s.secret_key,
            "agentToken": pool.token,
        },
        f"colchis-pool-{pool.name}": {"engines": pool.addresses},
    }


def pool_environment(pool: Pool) -> dict[str, str]:
    return {"COLCHIS_ENGINES": pool.addresses, "COLCHIS_AGENT_TOKEN": pool.token}


async def _interpret(
    run: LocalRun,
    config: RunConfig,
    home: Home,
    templates: Mapping[str, dict[str, Any]],
    store: Store,
    pool: Pool,
    on_event: Callable[[Event], None],
) -> WorkflowResult:
    launcher: Launcher = ExecLauncher() if run.exec_ else WarmLauncher()
    folder = home.run_folder(run.run)
    name = next(n for i in count(1) if not _taken(n := f"{run.run}-{i}", run.run, folder, store))
    interpreter = Interpreter(
        templates,
        work_dir=folder / "workflows",
        environment={},
        secrets=run_secrets(store, pool),
        launcher=launcher,
        on_event=on_event,
    )
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        interpreter.stop()
        loop.remove_signal_handler(signal.SIGINT)  # the next one is a KeyboardInterrupt, which waits for no stage

    loop.add_signal_handler(signal.SIGINT, interrupted)
    loop.add_signal_handler(signal.SIGTERM, interpreter.stop)
    try:
        return await interpreter.run(
            workflow(config, run=run.run, pool=pool.name, shape=run.shape, metadata={"name": name})
        )
    finally:
        await launcher.close()


def _taken(workflow: str, run: str, folder: Path, store: Store) -> bool:
    """Whether a Workflow of that name went before, here or on another machine that uses the store."""
    return (folder / "workflows" / workflow).exists() or store.find(keys.run_outcome(run, workflow)) is not None


@contextmanager
def held_run(store: Store, run: str) -> Iterator[None]:
    """Hold the run's lease and renew it in the background. BadConfig names the holder when another runner has it."""
    holder = f"{getpass.getuser()}@{socket.gethostname()}, process {os.getpid()}"
    lease = Lease(store, keys.run_lease(run), holder=holder, lease_s=RUN_LEASE_S)
    lease.acquire(wait_s=RUN_LEASE_S * 1.5)
    try:
        with lease.kept():
            yield
    finally:
        lease.release()


def stop(store: Store, run: str, reason: str) -> None:
    """Wish that no further iteration starts."""
    known_run(store, run)
    store.put(keys.run_stop(run), StopWish(reason=reason, by=getpass.getuser()).to_bytes())


def skip(store: Store, run: str, iteration: int, reason: str) -> None:
    """Commit that an iteration trains nothing, after a refusal that will not go away. What it has committed stays."""
    iterations = known_run(store, run).config.loop.iterations
    if iteration >= iterations:
        raise BadData(f"run '{run}' has {iterations} iterations, so no iteration {iteration} that could be skipped")
    if find_summary(store, run, iteration) is not None:
        raise BadData(f"iteration {iteration} of run '{run}' is closed; only the open iteration can be skipped")
    if iteration > 0 and find_summary(store, run, iteration - 1) is None:
        raise BadData(f"iteration {iteration} of run '{run}' is not the open one: {iteration - 1} is not closed either")
    train = find_commit(store, StageKey(run, iteration, "train"))
    if train is not None:
        raise BadData(
            f"iteration {iteration} of run '{run}' has made v{train.outputs['version']} already",
            where=train.key,
            hint="continue the run: what is left is to load it into the engines",
        )
    Attempt(store, StageKey(run, iteration, "skip")).commit(outputs={"reason": reason, "by": getpass.getuser()})
