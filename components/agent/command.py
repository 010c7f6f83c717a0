"""Command line of the agent, shared by `python -m colchis.components agent` and `python -m colchis.components.agent`."""

from __future__ import annotations

from pathlib import Path

import click

from colchis.components.agent.agent import AgentSettings
from colchis.components.agent.app import serve
from colchis.components.credentials import credential
from colchis.components.store import StoreSettings


@click.command("agent")
@click.option("--engine-url", required=True, help="Address of the engine, e.g. http://127.0.0.1:30000.")
@click.option("--engine-id", default=None, help="Name of the engine in records; default: its address.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=int, required=True, help="0 takes a free one and logs it.")
@click.option("--staging", type=click.Path(path_type=Path), required=True, help="Folder for versions, on local disk.")
@click.option("--engine-staging", default=None, help="The staging folder as the engine sees it, if mounted elsewhere.")
@click.option("--budget-bytes", type=int, default=None, help="Most bytes of staged versions; default: the disk.")
@click.option(
    "--cache", type=click.Path(path_type=Path), default=None, help="Folder that all agents of this node share."
)
@click.option(
    "--cache-bytes", type=int, default=None, help="Most bytes of the cache; a tenth of the disk stays free in any case."
)
@click.option("--token-env", default="COLCHIS_AGENT_TOKEN", show_default=True, help="Variable with the bearer token.")
@click.option("--pool", default=None, help="Pool that the engine belongs to.")
def command(
    engine_url: str,
    engine_id: str | None,
    host: str,
    port: int,
    staging: Path,
    engine_staging: str | None,
    budget_bytes: int | None,
    cache: Path | None,
    cache_bytes: int | None,
    token_env: str,
    pool: str | None,
) -> None:
    """The sidecar beside an engine: fetches, activates and proves versions.

    The store is configured by COLCHIS_S3_*; keys of the engine, if it has any, are COLCHIS_ENGINE_KEY and
    COLCHIS_ENGINE_ADMIN_KEY.
    """
    settings = AgentSettings(
        engine_url=engine_url,
        engine_id=engine_id or engine_url.split("//")[-1],
        staging=staging,
        pool=pool,
        engine_staging=engine_staging,
        engine_key=credential("COLCHIS_ENGINE_KEY") or None,
        engine_admin_key=credential("COLCHIS_ENGINE_ADMIN_KEY") or None,
        budget_bytes=budget_bytes,
        cache=cache,
        cache_bytes=cache_bytes,
    )
    serve(settings, StoreSettings.from_environment(), host=host, port=port, token=credential(token_env))
