"""What every part's tests may use: a real object store on loopback, and a bucket of one's own in it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from colchis.components.engine.sglang_cpu import environment
from colchis.components.store import Store, StoreSettings
from colchis.workflows.local.weed import Weed


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests on real SGLang need its environment; where a target of make has built it, they do not get by without."""
    if item.get_closest_marker("sglang") is None or environment.find() is not None:
        return
    lacking = "the environment of SGLang has not been built: run `make test-sglang`"
    if os.environ.get("COLCHIS_SGLANG") == "required":
        pytest.fail(lacking)
    pytest.skip(lacking)


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
