"""The pool of engines that a run leases: who may use it, and for how long after its last sign of life."""

from __future__ import annotations

from colchis.components.store import keys
from colchis.components.store.lease import Lease, LeaseRecord
from colchis.components.store.store import Store

LEASE_S = 600.0
HOLDER = "run "
"""Before the name of a run that holds a pool."""


def pool_lease(store: Store, pool: str, run: str) -> Lease:
    """The lease of a pool, for any process of a run. `acquire` refuses by the name of the run that has it."""
    return Lease(store, keys.pool_lease(pool), holder=f"{HOLDER}{run}", lease_s=LEASE_S)


def run_of_pool(store: Store, pool: str) -> str | None:
    """The run that leased a pool last and did not let go, alive or not; None when there is none."""
    found = store.find(key := keys.pool_lease(pool))
    if found is None:
        return None
    record = LeaseRecord.from_bytes(found.data, key)
    holds = not record.released and record.holder.startswith(HOLDER)
    return record.holder.removeprefix(HOLDER) if holds else None
