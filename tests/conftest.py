"""What every part's tests may use: a real object store on loopback, and a bucket of one's own in it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from colchis.components.store import Store, StoreSettings
from colchis.workflows.local.weed import Weed


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    """One SeaweedFS for the whole test session."""
    folder: Path = tmp_path_factory.mktemp("weed")
    with Weed(folder) as running:
        yield running


def fresh_bucket(weed: Weed) -> StoreSettings:
    """A bucket of one's own, for tests that share a store longer than one test lasts: an agent knows one store."""
    settings = replace(weed.settings, bucket=f"test-{uuid.uuid4().hex[:16]}")
    Store(settings).requests.client.create_bucket(Bucket=settings.bucket)
    return settings


@pytest.fixture
def store_settings(weed: Weed) -> Iterator[StoreSettings]:
    """A fresh bucket for one test, deleted with what is in it."""
    settings = fresh_bucket(weed)
    yield settings
    Store(settings).requests.client.delete_bucket(Bucket=settings.bucket)


@pytest.fixture
def store(store_settings: StoreSettings) -> Store:
    """A client of a fresh bucket, with a deadline that a test can wait for."""
    return Store(store_settings, deadline_s=20.0)
