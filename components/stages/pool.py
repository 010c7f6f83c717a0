"""The pool of engines that a run leases: who may use it, and for how long after its last sign of life."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from colchis.components.errors import ColchisError
from colchis.components.store import Lease, Store, keys
from colchis.components.store.lease import RENEWALS

logger = logging.getLogger(__name__)

LEASE_S = 600.0


def pool_lease(store: Store, pool: str, run: str) -> Lease:
    """The lease of a pool, for any process of a run. `acquire` refuses by the name of the run that has it."""
    return Lease(store, keys.pool_lease(pool), holder=f"run {run}", lease_s=LEASE_S)


@contextmanager
def keeping(store: Store, pool: str, run: str) -> Iterator[None]:
    """Renews the run's lease of its pool while the block runs: a stage may take longer than the lease lasts.

    A lease that was lost is a warning here; the next stage that asks an engine for something is refused.
    """
    ended = threading.Event()

    def renew() -> None:
        lease = pool_lease(store, pool, run)
        while not ended.wait(LEASE_S / RENEWALS):
            try:
                lease.renew()
            except ColchisError as error:
                logger.warning("the lease of pool '%s' was not renewed: %s", pool, error)

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
