"""SGLang servers that serve adapters, each with its agent, and the versions of one run that they are given."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from colchis.components.config import TrainerConfig
from colchis.components.engine.sglang_cpu import adapter_arguments, launch_command
from colchis.components.records.boundary import BoundaryRecord
from colchis.components.records.run import Serving
from colchis.components.records.weights import Adapter as AdapterRecord
from colchis.components.records.weights import Probe, WeightsManifest
from colchis.components.rollout import Adapter as ServedBy
from colchis.components.rollout import Engine, Wanted
from colchis.components.rollout.client import Completion, Refusal, generate
from colchis.components.store import Store, keys, upload_input
from colchis.components.trainer.adapters import attach, write_config
from colchis.components.trainer.model import load_model
from colchis.components.trainer.optimiser import Optimiser
from colchis.components.trainer.probe import sequence_logprobs
from colchis.components.trainer.ranks import process_group
from colchis.components.trainer.state import write_state, write_weights
from colchis.components.weights import Agents, activate_all, prepare_all, probe_all, verify_all, verify_published
from colchis.components.weights.manifest import build
from colchis.components.weights.protocol import ServedAdapter
from colchis.components.weights.publish import publish
from colchis.workflows.local.ports import free_port
from colchis.workflows.local.services import Child
from tests.agent.conftest import DEADLINE_S, TOKEN, AgentProcess
from tests.contract.conftest import START_S
from tests.engine.processes import EngineProcess, client_of
from tests.weights.models import RUN, publish_version

TRAINER = TrainerConfig(lora_rank=4, lora_alpha=8.0)
TOKENS = [3, 7, 11, 20, 5, 9]
TOLERANCE = 2e-5


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
        self.policy = policy
        self.logprobs = sequence_logprobs(policy, [TOKENS])[0]
        with process_group():
            write_weights(policy, folder / "weights", dtype=torch.float32)
            write_state(
                policy,
                Optimiser(policy, TRAINER),
                folder,
                version=1,
                weights="",
                dtype=torch.float32,
            )
        self.merged = folder / "weights"
        self.folder = folder / "adapter"
        write_config(self.folder, TRAINER)


@dataclass
class Server:
    """SGLang that serves adapters, on one port whenever it runs."""

    model: Path
    log: Path
    port: int
    child: Child | None = None

    @classmethod
    def started(cls, model: Path, folder: Path) -> Server:
        server = cls(model, folder / "log", free_port())
        server.start()
        return server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def process(self) -> EngineProcess:
        assert self.child is not None
        return EngineProcess(self.child.process, self.url, client_of(self.url))

    def start(self) -> None:
        more = adapter_arguments(TRAINER.lora_rank, TRAINER.lora_targets)
        argv = launch_command(model=self.model, port=self.port, more=more)
        self.child = Child("sglang", argv, log=self.log, environment={})
        try:
            self.child.wait_for(f"{self.url}/ready", deadline_s=START_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        if self.child is not None:
            self.child.stop()

    def loaded(self) -> set[str]:
        """Names of the adapters that it has."""
        models = httpx.get(f"{self.url}/v1/models", timeout=DEADLINE_S).json()["data"]
        return {m["id"] for m in models if m["parent"]}

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=DEADLINE_S)


class Pool:
    """Servers of one model with an agent each; v0 is their base, v1 to vN are the adapters. vN+1 is said to be what it is
    not, and vN+2 is the last adapter merged.

    `through`: what the agents call their engines by, in place of the servers' own addresses.
    """

    def __init__(
        self,
        servers: list[Server],
        adapters: list[Adapter],
        store: Store,
        folder: Path,
        through: list[str] | None = None,
        name: str = "main",
    ) -> None:
        self.servers, self.adapters, self.store = servers, adapters, store
        self.model = upload_input(store, servers[0].model)
        base = publish_version(store, servers[0].model, model=self.model, version=0)
        self.manifests = [base, *(self._publish(n, base, a, a.logprobs) for n, a in enumerate(adapters, start=1))]
        self.manifests.append(self._publish(len(adapters) + 1, base, adapters[0], adapters[1].logprobs))
        self.merged = len(adapters) + 2
        self.manifests.append(publish(store, self._manifest(self.merged, adapters[-1])))
        self.agents: list[AgentProcess] = []
        for number, url in enumerate(through or [s.url for s in servers]):
            own = folder / f"agent-{number}"
            own.mkdir()
            self.agents.append(AgentProcess(own, url, store.settings, f"engine-{number}", more=["--pool", name]))

    @property
    def agent(self) -> AgentProcess:
        """That of the first server."""
        return self.agents[0]

    @property
    def server(self) -> Server:
        return self.servers[0]

    def stop(self) -> None:
        """Of the agents alone."""
        for agent in self.agents:
            agent.child.stop()

    def _prefix(self, version: int) -> str:
        return keys.iteration_prefix(RUN, version) + "train/attempts/x/"

    def _manifest(self, version: int, adapter: Adapter) -> WeightsManifest:
        path = adapter.merged / "model.safetensors"
        return build(
            run=RUN,
            version=version,
            base_version=version - 1,
            kind="full",
            files=[(self.store.upload(self._prefix(version) + path.name, path), path)],
            model=self.model,
            step=version,
        )

    def _publish(self, version: int, base: WeightsManifest, adapter: Adapter, logprobs: list[float]) -> WeightsManifest:
        manifest = self._manifest(version, adapter)
        files = [self.store.upload(self._prefix(version) + p.name, p) for p in sorted(adapter.folder.iterdir())]
        record = AdapterRecord(
            base_version=0,
            base_digest=base.weights_digest,
            rank=TRAINER.lora_rank,
            alpha=TRAINER.lora_alpha,
            targets=TRAINER.lora_targets,
            files=files,
            probe=Probe(token_ids=[TOKENS], logprobs=[logprobs], tolerance=TOLERANCE),
        )
        return publish(self.store, WeightsManifest.model_validate({**manifest.model_dump(), "adapter": record}))

    def records(self, version: int, deadline_s: float = DEADLINE_S) -> list[BoundaryRecord]:
        """All five boundaries at all servers."""
        manifest = self.manifests[version]
        adapter = self.adapters[min(version, len(self.adapters)) - 1]
        probe = {"token_ids": [TOKENS], "logprobs": [adapter.logprobs]} if version else None

        async def run() -> list[BoundaryRecord]:
            async with Agents([agent.url for agent in self.agents], TOKEN) as agents:
                return [
                    verify_published(self.store, RUN, version),
                    *await prepare_all(agents, manifest, deadline_s=deadline_s),
                    *await verify_all(agents, manifest, deadline_s=deadline_s),
                    *await activate_all(agents, manifest, deadline_s=deadline_s),
                    *await probe_all(agents, manifest, probe=probe, tolerance=TOLERANCE, deadline_s=deadline_s),
                ]

        return asyncio.run(run())

    def reload(self, version: int) -> dict[str, dict[str, Any]]:
        """The proof of each boundary, of a pool of one server."""
        assert len(self.servers) == 1
        return {record.name: record.proof for record in self.records(version)}

    def declare(self, version: int) -> None:
        """As the last boundary of a reload does."""
        digest = self.manifests[version].weights_digest
        engines = [agent.engine_id for agent in self.agents]
        serving = Serving(run=RUN, version=version, weights_digest=digest, engines=engines)
        self.store.put(keys.serving(RUN), serving.to_bytes())

    def name(self, version: int) -> str:
        name = self.manifests[version].adapter_name
        assert name is not None
        return name

    def names(self, *versions: int) -> set[str]:
        return {self.name(v) for v in versions}

    def served(self, version: int) -> ServedAdapter:
        adapter = self.manifests[version].adapter
        assert adapter is not None
        return ServedAdapter(name=self.name(version), label=adapter.base_label)

    def ask(self, version: int, samples: int, tokens: int, server: int = 0) -> list[Completion | Refusal]:
        """As a rollout does that knows a server to serve `version`, and takes no other."""
        named = self.served(version)
        engine = Engine(f"engine-{server}", self.servers[server].url, ServedBy(named.name, version, named.label))

        async def run() -> list[Completion | Refusal]:
            async with httpx.AsyncClient() as client:
                return await generate(
                    client,
                    engine,
                    [TOKENS] * samples,
                    [{"max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": n} for n in range(samples)],
                    wanted=Wanted.exactly(version),
                    prove=unasked,
                    headers={},
                    timeout_s=DEADLINE_S,
                )

        return asyncio.run(run())

    def logprobs(self, version: int, token_ids: list[int]) -> list[float]:
        """What the policy of that version says of tokens behind `TOKENS`."""
        expected: list[float] = sequence_logprobs(self.adapters[version - 1].policy, [[*TOKENS, *token_ids]])[0]
        return expected[len(TOKENS) - 1 :]


async def unasked(engine: Engine, marks: set[str], timeout_s: float) -> dict[str, int]:
    """Labels of bases need no proof of a load."""
    raise AssertionError(f"{marks} were to be proven")
