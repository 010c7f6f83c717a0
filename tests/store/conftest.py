"""A client of the test's bucket that goes through a proxy which injects faults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from minio import Minio

from colchis.components.store import Store, StoreSettings
from tests.faults import FaultProxy


@pytest.fixture
def proxy(store_settings: StoreSettings) -> Iterator[FaultProxy]:
    address = urlsplit(store_settings.endpoint)
    assert address.hostname
    assert address.port
    with FaultProxy((address.hostname, address.port)) as running:
        yield running


@pytest.fixture
def faulty(store_settings: StoreSettings, proxy: FaultProxy) -> Store:
    """A client whose requests all pass the proxy."""
    return Store(replace(store_settings, endpoint=proxy.url), deadline_s=20.0)


@pytest.fixture
def other_client(store_settings: StoreSettings) -> Minio:
    """An independent S3 client on the same bucket."""
    return Minio(
        urlsplit(store_settings.endpoint).netloc,
        access_key=store_settings.access_key,
        secret_key=store_settings.secret_key,
        secure=False,
        region=store_settings.region,
    )
