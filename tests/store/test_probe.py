"""The probe tells a store that keeps the promises of the commit protocol from one that does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from colchis.components.errors import BadConfig
from colchis.components.store import Store, StoreSettings, probe
from tests.faults import Fault, FaultProxy, Promise, UnfitStore


def test_a_real_store_is_fit_and_left_clean(store: Store) -> None:
    probe(store)
    assert store.list("") == []


def test_a_store_that_keeps_its_promises_is_fit(store_settings: StoreSettings) -> None:
    """Without this the refusals below might be for another reason."""
    with UnfitStore(None) as server:
        probe(Store(replace(store_settings, endpoint=server.url)))


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        ("create", "create of an existing key"),
        ("create-race", "16 concurrent creates of one key.*exactly one winner"),
        ("swap", "stale ETag"),
        ("swap-race", "16 concurrent swaps on one ETag.*exactly one winner"),
        ("overwrite", "read after write"),
    ],
)
def test_a_broken_promise_is_named(store_settings: StoreSettings, broken: Promise, check: str) -> None:
    with (
        UnfitStore(broken) as server,
        pytest.raises(BadConfig, match=f"{server.url} is unfit: check '.*{check}"),
    ):
        probe(Store(replace(store_settings, endpoint=server.url)))


def test_lost_replies_do_not_make_a_store_unfit(faulty: Store, proxy: FaultProxy) -> None:
    """The network is not the store: a create whose reply was lost is still one creation."""
    proxy.add(Fault("PUT", "second-create$", "swallow"))
    proxy.add(Fault("PUT", "create-0$", "swallow", times=4))
    proxy.add(Fault("PUT", "swap-0$", "swallow", times=4))
    probe(faulty)


def test_a_store_that_has_no_conditional_writes(faulty: Store, proxy: FaultProxy) -> None:
    proxy.add(Fault("PUT", "second-create$", "status", status=501, code="NotImplemented"))
    with pytest.raises(BadConfig, match="NotImplemented"):
        probe(faulty)
