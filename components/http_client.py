"""The HTTP client for agents and engines."""

from __future__ import annotations

import httpx

_AUTHORITIES = httpx.create_ssl_context()
"""Reading the certificates of all authorities takes longer than a small request: once, also for forked processes."""


def pool_client(*, keepalive: int | None = None) -> httpx.AsyncClient:
    """A client for the addresses of a pool: any number of connections at once, `keepalive` of them kept (None: all), and
    no proxy, because nothing lies between the pods of a cluster."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=keepalive)
    return httpx.AsyncClient(limits=limits, trust_env=False, verify=_AUTHORITIES)
