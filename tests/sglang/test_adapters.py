"""The adapter that a run exports, on real SGLang; and what stands between serving it so and a reload that is proven."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from colchis.components.config import TrainerConfig
from colchis.components.engine.sglang_cpu import environment, launch_command
from colchis.components.trainer.adapters import attach, write_config
from colchis.components.trainer.model import load_model
from colchis.components.trainer.optimiser import Optimiser
from colchis.components.trainer.probe import sequence_logprobs
from colchis.components.trainer.ranks import process_group
from colchis.components.trainer.state import write_state
from colchis.workflows.local.ports import free_port
from colchis.workflows.local.services import Child
from tests.engine.processes import EngineProcess, client_of
from tests.run.conftest import model
from tests.sglang.conftest import START_S

__all__ = ["model"]

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

TRAINER = TrainerConfig(lora_rank=4, lora_alpha=8.0)
TOKENS = [3, 7, 11, 20, 5, 9]


class Adapter:
    """A random adapter of the model in `base`, in the files that a train commit has, and what the policy says with it."""

    def __init__(self, base: Path, folder: Path, seed: int) -> None:
        torch.set_num_threads(1)
        policy = load_model(base)
        attach(policy, TRAINER, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in policy.named_parameters():
            if name.endswith("lora_B"):
                parameter.data.normal_(0, 0.3, generator=generator)
        self.logprobs = sequence_logprobs(policy, [TOKENS])[0]
        with process_group():
            write_state(
                policy,
                Optimiser(policy, TRAINER),
                folder,
                version=1,
                weights="",
                dtype=torch.float32,
            )
        self.folder = folder / "adapter"
        write_config(self.folder, TRAINER)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    return [Adapter(model, tmp_path_factory.mktemp(f"adapter{seed}"), seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    if environment.find() is None:
        pytest.skip("the environment of SGLang has not been built: run `make test-sglang`")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    lora = ("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "4", "--max-loras-per-batch", "4")
    argv = launch_command(model=model, port=port, more=(*lora, "--lora-target-modules", *TRAINER.lora_targets))
    child = Child("sglang", argv, log=tmp_path_factory.mktemp("sglang") / "log", environment={})
    try:
        child.wait_for(f"{url}/ready", deadline_s=START_S)
        yield EngineProcess(child.process, url, client_of(url))
    finally:
        child.stop()


def gap(server: EngineProcess, expected: list[float], name: str | None) -> float:
    """Largest difference of log-probabilities between an adapter on the server and `expected`."""
    body: dict[str, Any] = {"input_ids": TOKENS, "sampling_params": {"max_new_tokens": 1}}
    answer = server.generate(**body, return_logprob=True, logprob_start_len=0, lora_path=name)
    rows = answer["meta_info"]["input_token_logprobs"][1:]
    return max(abs(row[0] - value) for row, value in zip(rows, expected, strict=True))


def test_an_exported_adapter_is_the_policy_that_was_trained(
    server: EngineProcess, model: Path, adapters: list[Adapter]
) -> None:
    """Catches names, a scale or an order of factors that only we understand."""
    base = sequence_logprobs(load_model(model), [TOKENS])[0]
    for number, adapter in enumerate(adapters):
        body = {"lora_name": f"v{number}", "lora_path": str(adapter.folder)}
        assert server.client.post("/load_lora_adapter", json=body).json()["success"] is True
    for number, adapter in enumerate(adapters):
        assert gap(server, adapter.logprobs, f"v{number}") < 2e-5
        assert gap(server, base, f"v{number}") > 1e-2
    assert gap(server, base, None) < 2e-5


def test_what_a_proven_reload_of_adapters_has_to_know(server: EngineProcess, adapters: list[Adapter]) -> None:
    """Three facts behind the decision to publish adapters merged. A change here is news, not a fault."""

    def load(name: str, adapter: Adapter) -> bool:
        body = {"lora_name": name, "lora_path": str(adapter.folder)}
        return server.client.post("/load_lora_adapter", json=body).status_code == 200

    before = server.checksum()
    assert load("x", adapters[0])
    assert server.checksum() == before  # checksums are of the base alone
    assert server.info("weight_version") == "none"  # and so is the label
    assert not load("x", adapters[1])  # a name is never given anew
    assert server.client.post("/unload_lora_adapter", json={"lora_name": "x"}).status_code == 200
    assert gap(server, adapters[0].logprobs, "x") < 2e-5  # a request for what was unloaded loads it again
