from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from colchis.components.trainer.ranks import process_group
from tests.trainer.cases import make_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tiny fp32 model."""
    return make_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    with process_group():
        yield
