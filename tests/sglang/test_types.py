"""Real SGLang that is left to choose a type for the weights by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from colchis.components.engine.sglang_cpu import launch_command
from colchis.components.errors import BadConfig
from colchis.components.store import Store, StoreSettings
from colchis.workflows.local.ports import free_port
from colchis.workflows.local.services import Child
from tests.agent.conftest import AgentProcess
from tests.contract.conftest import START_S, bucket, models
from tests.contract.replica import Versions

__all__ = ["bucket", "models"]

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


def test_a_server_that_chooses_by_itself_is_refused(
    bucket: StoreSettings, models: dict[str, Path], tmp_path: Path
) -> None:
    """Fault: with `--dtype auto` SGLang serves a float32 model in float16, and says `auto` when it is asked."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    argv = launch_command(model=models["qwen2_a"], port=port, dtype="auto")
    server = Child("sglang", argv, log=tmp_path / "log", environment={})
    try:
        server.wait_for(f"{url}/ready", deadline_s=START_S)
        agent = AgentProcess(tmp_path, url, bucket, environment={})
        agent.run = Versions(Store(bucket, deadline_s=20.0), models).run
        try:
            with pytest.raises(BadConfig, match=r"runs with dtype auto, weights v0 are float32.*--dtype float32"):
                agent.bring(0)
            assert not agent.status().ready
        finally:
            agent.child.stop()
    finally:
        server.stop()
