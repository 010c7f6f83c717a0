"""The model of the runs and adapters of it, for tests on real SGLang. Needs `make test-sglang`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.conftest import START_S
from tests.run.conftest import model
from tests.sglang.adapters import Adapter, Server

__all__ = ["START_S", "model"]


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    return [Adapter(model, tmp_path_factory.mktemp(f"adapter{seed}"), seed) for seed in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that serves adapters, with the base model."""
    server = Server.started(model, tmp_path_factory.mktemp("sglang"))
    yield server
    server.stop()
