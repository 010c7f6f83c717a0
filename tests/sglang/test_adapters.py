"""Adapters on real SGLang: the files that a run exports, and versions that are served so, over the five boundaries."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import torch

from colchis.components.config import TrainerConfig
from colchis.components.engine.sglang_cpu import adapter_arguments, launch_command
from colchis.components.errors import BadData
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
from colchis.components.weights import activate_all, prepare_all, probe_all, verify_all, verify_published
from colchis.components.weights.manifest import build
from colchis.components.weights.protocol import EngineState, ServedAdapter
from colchis.components.weights.publish import publish
from colchis.workflows.local.ports import free_port
from colchis.workflows.local.services import Child
from colchis.workflows.local.weed import Weed
from tests.agent.conftest import DEADLINE_S, AgentProcess
from tests.conftest import fresh_bucket
from tests.engine.processes import EngineProcess, client_of
from tests.run.conftest import model
from tests.sglang.conftest import START_S
from tests.waiting import eventually
from tests.weights.models import RUN, publish_version

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


async def unasked(engine: Engine, marks: set[str], timeout_s: float) -> dict[str, int]:
    """Labels of bases need no proof of a load."""
    raise AssertionError(f"{marks} were to be proven")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    return [Adapter(model, tmp_path_factory.mktemp(f"adapter{seed}"), seed) for seed in (1, 2, 3, 4)]


@dataclass
class Server:
    """SGLang that serves adapters, on one port whenever it runs."""

    model: Path
    log: Path
    port: int
    child: Child | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> EngineProcess:
        more = adapter_arguments(TRAINER.lora_rank, TRAINER.lora_targets)
        argv = launch_command(model=self.model, port=self.port, more=more)
        self.child = Child("sglang", argv, log=self.log, environment={})
        self.child.wait_for(f"{self.url}/ready", deadline_s=START_S)
        return EngineProcess(self.child.process, self.url, client_of(self.url))

    def stop(self) -> None:
        if self.child is not None:
            self.child.stop()


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(model, tmp_path_factory.mktemp("sglang") / "log", free_port())
    try:
        found.start()
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="module")
def server(running: Server) -> EngineProcess:
    assert running.child is not None
    return EngineProcess(running.child.process, running.url, client_of(running.url))


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
    for number, adapter in enumerate(adapters[:2]):
        body = {"lora_name": f"v{number}", "lora_path": str(adapter.folder)}
        assert server.client.post("/load_lora_adapter", json=body).json()["success"] is True
    for number, adapter in enumerate(adapters[:2]):
        assert gap(server, adapter.logprobs, f"v{number}") < 2e-5
        assert gap(server, base, f"v{number}") > 1e-2
    assert gap(server, base, None) < 2e-5


def test_what_a_reload_of_adapters_has_to_know(server: EngineProcess, adapters: list[Adapter]) -> None:
    """Facts of SGLang that the activation of an adapter is built on. A change here is news, not a fault."""

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
    for name in ("x", "v0", "v1"):
        server.client.post("/unload_lora_adapter", json={"lora_name": name})


class Pool:
    """That server with an agent; v0 is its base, v1 to v4 are the adapters. v5 is said to be what it is not."""

    def __init__(self, server: Server, adapters: list[Adapter], store: Store, folder: Path) -> None:
        self.server, self.adapters, self.store = server, adapters, store
        self.model = upload_input(store, server.model)
        base = publish_version(store, server.model, model=self.model, version=0)
        self.manifests = [base, *(self._publish(n, base, a, a.logprobs) for n, a in enumerate(adapters, start=1))]
        self.manifests.append(self._publish(len(adapters) + 1, base, adapters[0], adapters[1].logprobs))
        self.agent = AgentProcess(folder, server.url, store.settings)

    def _publish(self, version: int, base: WeightsManifest, adapter: Adapter, logprobs: list[float]) -> WeightsManifest:
        prefix = keys.iteration_prefix(RUN, version) + "train/attempts/x/"
        path = adapter.merged / "model.safetensors"
        manifest = build(
            run=RUN,
            version=version,
            base_version=version - 1,
            kind="full",
            files=[(self.store.upload(prefix + path.name, path), path)],
            model=self.model,
            step=version,
        )
        files = [self.store.upload(prefix + p.name, p) for p in sorted(adapter.folder.iterdir())]
        record = AdapterRecord(
            base_version=0,
            base_digest=base.weights_digest,
            rank=TRAINER.lora_rank,
            alpha=TRAINER.lora_alpha,
            targets=TRAINER.lora_targets,
            files=files,
            probe=Probe(token_ids=[TOKENS], logprobs=[logprobs], tolerance=2e-5),
        )
        return publish(self.store, WeightsManifest.model_validate({**manifest.model_dump(), "adapter": record}))

    def reload(self, version: int) -> dict[str, dict[str, Any]]:
        """All five boundaries; the proof of each."""
        manifest = self.manifests[version]
        probe = {"token_ids": [TOKENS], "logprobs": [self.adapters[version - 1].logprobs]} if version else None

        async def run() -> list[BoundaryRecord]:
            async with self.agent.agents() as agents:
                return [
                    verify_published(self.store, RUN, version),
                    *await prepare_all(agents, manifest, deadline_s=DEADLINE_S),
                    *await verify_all(agents, manifest, deadline_s=DEADLINE_S),
                    *await activate_all(agents, manifest, deadline_s=DEADLINE_S),
                    *await probe_all(agents, manifest, probe=probe, tolerance=2e-5, deadline_s=DEADLINE_S),
                ]

        return {record.name: record.proof for record in asyncio.run(run())}

    def loaded(self) -> set[str]:
        models = httpx.get(f"{self.server.url}/v1/models").json()["data"]
        return {m["id"] for m in models if m["parent"]}

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

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.server.url + path, json=body, timeout=DEADLINE_S)

    def ask(self, version: int, samples: int, tokens: int) -> list[Completion | Refusal]:
        """As a rollout does that knows the engine to serve `version`, and takes no other."""

        named = self.served(version)

        async def run() -> list[Completion | Refusal]:
            async with httpx.AsyncClient() as client:
                return await generate(
                    client,
                    Engine("engine-0", self.server.url, ServedBy(named.name, version, named.label)),
                    [TOKENS] * samples,
                    [{"max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": n} for n in range(samples)],
                    wanted=Wanted.exactly(version),
                    prove=unasked,
                    headers={},
                    timeout_s=DEADLINE_S,
                )

        return asyncio.run(run())


@pytest.fixture(scope="module")
def pool(
    running: Server, adapters: list[Adapter], weed: Weed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pool]:
    found = Pool(running, adapters, Store(fresh_bucket(weed)), tmp_path_factory.mktemp("agent"))
    yield found
    found.agent.child.stop()


def test_versions_are_served_as_adapters_over_five_boundaries(pool: Pool) -> None:
    """Fault: an adapter that nobody can prove, a pause that nobody needs, adapters that pile up in the engine."""
    first = pool.reload(0)
    assert first["load"]["adapter"] is None
    for version in (1, 2, 3):
        proof = pool.reload(version)
        manifest = pool.manifests[version]
        assert proof["load"]["adapter"] == proof["transfer"]["adapter"] == manifest.adapter_name
        assert proof["load"]["engine_checksum"] == first["load"]["engine_checksum"], "the base stays"
        assert proof["load"]["checksums_equal"] is True
        assert proof["load"]["pause_s"] == 0
        assert manifest.adapter is not None
        assert proof["transfer"]["bytes"] == sum(f.bytes for f in manifest.adapter.files), "the base was there"
        assert proof["cache"]["max_gap"] < 2e-5
    status = pool.agent.status()
    assert (status.version, status.adapter) == (3, pool.served(3))
    assert pool.loaded() == pool.names(2, 3)
    assert pool.agent.activate(3).repeated


def test_what_is_in_flight_goes_on_under_the_adapter_it_named(pool: Pool, server: EngineProcess) -> None:
    """Fault: tokens said to be of the new version since the engine bears its name by now."""
    pool.reload(1)
    pool.agent.prepare(2)
    answers: list[Completion | Refusal] = []
    activated = Event()

    def keep_asking() -> None:
        while not activated.is_set():
            answers.extend(pool.ask(1, 16, 56))

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(keep_asking)
        eventually(server.busy, "a request runs")
        assert pool.agent.activate(2).pause_s == 0
        activated.set()
        asking.result()
    assert answers
    for answer in answers:
        assert isinstance(answer, Completion)
        assert [(v.version, v.start, v.end) for v in answer.versions] == [(1, 0, 56)]
        expected = sequence_logprobs(pool.adapters[0].policy, [[*TOKENS, *answer.token_ids]])[0]
        assert answer.logprobs == pytest.approx(expected[len(TOKENS) - 1 :], abs=5e-5)


def test_a_damaged_adapter_is_refused_while_the_old_version_serves(pool: Pool) -> None:
    pool.reload(1)
    manifest = pool.manifests[4]
    assert manifest.adapter is not None
    weights = next(f for f in manifest.adapter.files if f.name.endswith(".safetensors"))
    good = pool.store.get(weights.key).data
    pool.store.put(weights.key, good[:-4] + b"\0\0\0\1")
    try:
        with pytest.raises(BadData, match=r"boundary 1 .*adapter_model\.safetensors"):
            pool.reload(4)
        with pytest.raises(BadData, match=r"adapter_model\.safetensors"):
            pool.agent.prepare(4)
    finally:
        pool.store.put(weights.key, good)
    assert pool.agent.status().version == 1
    assert pool.reload(4)["cache"]["max_gap"] < 2e-5


def test_an_adapter_that_does_not_say_what_the_trainer_says_is_refused(pool: Pool) -> None:
    """Fault: layers, a scale or a type that the engine reads in another way; its checksums are those of the base alone."""
    pool.reload(1)
    pool.agent.prepare(5)
    with pytest.raises(BadData, match=r"under adapter .* differ by"):
        pool.agent.activate(5)
    assert pool.agent.ready().status_code == 503
    assert pool.reload(2)["load"]["pause_s"] == 0, "the base was there all the time"


def test_an_agent_that_is_killed_is_followed_by_one_that_knows(pool: Pool) -> None:
    """Fault: an engine that serves well and leaves the ready set, or is paused, since its agent died."""
    pool.reload(2)
    pool.agent.kill()
    pool.agent.start()
    status = pool.agent.status()
    assert (status.state, status.version) == (EngineState.SERVING, 2)
    assert status.adapter == pool.served(2)


def test_an_agent_that_is_killed_between_prepare_and_activate(pool: Pool) -> None:
    """Fault: a version that was prepared and is not there; what is served removed from the disk, and so disowned, since the
    first question to the new agent was to prepare something."""
    pool.reload(1)
    pool.agent.prepare(2)
    pool.agent.kill()
    pool.agent.start()
    proof = pool.agent.activate(2)
    assert (proof.previous, proof.pause_s) == (1, 0)
    pool.agent.kill()
    pool.agent.start()
    pool.agent.prepare(3)
    assert pool.agent.status().version == 2


def test_a_base_that_somebody_changed_is_noticed_and_repaired(pool: Pool) -> None:
    """Fault: an adapter on a base that it was not trained beside, under a label that says otherwise."""
    pool.reload(1)
    body = {"model_path": str(pool.adapters[3].merged), "flush_cache": True}
    assert pool.post("/update_weights_from_disk", body).json()["success"]
    pool.agent.prepare(2)
    with pytest.raises(BadData, match="not those of v0 any more"):
        pool.agent.activate(2)
    assert pool.agent.ready().status_code == 503
    assert httpx.get(f"{pool.server.url}/model_info").json()["weight_version"] == "unproven-2"
    proof = pool.reload(2)
    assert proof["load"]["pause_s"] > 0, "the base was loaded again"
    assert proof["cache"]["max_gap"] < 2e-5


def test_a_restarted_engine_gets_base_and_adapter_back(pool: Pool) -> None:
    """Fault: an engine that stays empty until the next reload, or gets the adapter without its base."""
    pool.reload(3)
    declared = pool.manifests[3]
    serving = Serving(run=RUN, version=3, weights_digest=declared.weights_digest, engines=["engine-0"])
    pool.store.put(keys.serving(RUN), serving.to_bytes())
    pool.server.stop()
    eventually(lambda: pool.agent.ready().status_code == 503, "it is not ready")
    pool.server.start()
    eventually(lambda: pool.agent.ready().status_code == 200, "it is ready again", deadline_s=120)
    assert pool.loaded() == pool.names(3)
    (answer,) = pool.ask(3, 1, 4)
    assert isinstance(answer, Completion)
    expected = sequence_logprobs(pool.adapters[2].policy, [[*TOKENS, *answer.token_ids]])[0]
    assert answer.logprobs == pytest.approx(expected[len(TOKENS) - 1 :], abs=5e-5)
