"""The pool of engines that a run leases: who may use it, and for how long after its last sign of life."""

from __future__ import annotations

from colchis.components.store import Lease, Store, keys

LEASE_S = 600.0


def pool_lease(store: Store, pool: str, run: str) -> Lease:
    """The lease of a pool, for any process of a run. `acquire` refuses by the name of the run that has it."""
    return Lease(store, keys.pool_lease(pool), holder=f"run {run}", lease_s=LEASE_S)
