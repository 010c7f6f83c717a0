"""The model of the runs, for tests of whole runs and of adapters on real SGLang. Needs `make test-sglang`."""

from __future__ import annotations

from tests.contract.conftest import START_S
from tests.run.conftest import model

__all__ = ["START_S", "model"]
