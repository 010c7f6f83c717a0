"""An engine with its agent, the versions of one run, and what tests do to the three of them from outside."""

from __future__ import annotations

import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from colchis.components.records.run import Serving
from colchis.components.records.weights import TensorEntry, WeightsManifest, weights_digest
from colchis.components.store import Store, keys, upload_input
from colchis.components.weights.checksums import predict
from colchis.components.weights.labels import proven_version
from colchis.components.weights.protocol import Activated, EngineState, Probe
from colchis.components.weights.publish import read_manifest
from tests.agent.conftest import AgentProcess
from tests.engine.processes import EngineProcess
from tests.engine.test_logprobs import reference
from tests.faults import Fault, FaultProxy
from tests.run.test_wrong_weights import Tensors, entries_of, join, parse
from tests.weights.models import publish_version

LOAD = "/update_weights_from_disk"
HASH = "/weights_checker"
ASK = "/generate"
TOKENS = [3, 7, 11, 42, 5, 9]


@dataclass
class Hold:
    """A request that a proxy holds back."""

    held: threading.Event = field(default_factory=threading.Event)
    open: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    """The proxy is done with it: it was forwarded, or its sender was gone."""

    def wait(self) -> None:
        assert self.held.wait(60), "nothing came that could be held"

    def wait_until_over(self) -> None:
        """After the block that holds it."""
        assert self.over.wait(60), "the proxy still has what it held"

    def block(self) -> None:
        self.held.set()
        self.open.wait(300)


@contextmanager
def holding(proxy: FaultProxy, method: str, path: str) -> Iterator[Hold]:
    """The next request that matches is held by the proxy until the test opens it, at the latest when the block ends."""
    hold = Hold()
    hold.over = proxy.add(Fault(method, path, "delay", before=hold.block)).struck
    try:
        yield hold
    finally:
        hold.open.set()
        proxy.clear()


@contextmanager
def held_activation(
    replica: Replica,
    version: int,
    agent: AgentProcess | None = None,
    *,
    at: str = LOAD,
    pause: Literal["retract", "abort"] = "retract",
) -> Iterator[tuple[Hold, Future[Activated]]]:
    """An activation that waits at a proxy, before its load unless told otherwise: then the engine is paused, and its label is no
    version. `agent`: another one than the replica's."""
    agent = agent or replica.agent
    agent.prepare(version)
    with holding(replica.engine_proxy, "POST", at) as hold, ThreadPoolExecutor(1) as pool:
        activation = pool.submit(agent.activate, version, pause=pause)
        try:
            hold.wait()
            yield hold, activation
        finally:
            hold.open.set()  # else the pool would wait for what waits for it


@contextmanager
def held_proof(
    replica: Replica, version: int, between: Callable[[], None] = lambda: None, *, at: str = HASH
) -> Iterator[tuple[Hold, Future[Activated]]]:
    """An activation whose pause is over, and that waits before the engine's checksums unless told otherwise: it serves under
    the mark of its load. `between` is called in the pause, before the load."""
    with held_activation(replica, version) as (load, activation), holding(replica.engine_proxy, "POST", at) as hold:
        between()
        load.open.set()
        hold.wait()
        yield hold, activation


class Versions:
    """Versions of one run: v0 is qwen2_a, v1 is qwen2_b."""

    def __init__(self, store: Store, models: dict[str, Path]) -> None:
        self.store, self.run = store, f"run-{uuid.uuid4().hex[:8]}"
        self.folders = {0: models["qwen2_a"], 1: models["qwen2_b"]}
        self.model = upload_input(store, self.folders[0])
        for version in self.folders:
            self.publish(version, self.folders[version])

    def publish(self, version: int, folder: Path, *, kind: str = "full", base: Path | None = None) -> WeightsManifest:
        """As a trainer does; with the difference from the folder `base`, if given."""
        manifest = publish_version(
            self.store, folder, model=self.model, version=version, kind=kind, run=self.run, base=base
        )
        self.folders[version] = folder
        return manifest

    def publish_unchecked(
        self, version: int, tensors: Tensors, *, body: bytes | None = None, name: str = "model.safetensors"
    ) -> WeightsManifest:
        """As a trainer with a bug does, or somebody who can write to the store: what is said of the tensors is true, and
        nobody asked whether it should be served. `body`: the file, where it is another than theirs."""
        key = f"{keys.iteration_prefix(self.run, version)}train/attempts/{uuid.uuid4().hex}/weights/model.safetensors"
        payload = self.store.put_payload(key, join(tensors) if body is None else body)
        entries: list[TensorEntry] = entries_of(tensors, name)
        manifest = WeightsManifest(
            run=self.run,
            version=version,
            base_version=version - 1,
            kind="full",
            files=[payload.model_copy(update={"name": name})],
            tensors=entries,
            weights_digest=weights_digest(entries),
            model=self.model,
            step=version,
        )
        self.store.put(keys.weights_manifest(self.run, version), manifest.to_bytes())
        return manifest

    def declare(self, version: int) -> None:
        """As the last boundary of a reload does."""
        digest = read_manifest(self.store, self.run, version).weights_digest
        record = Serving(run=self.run, version=version, weights_digest=digest, engines=["engine-0"])
        self.store.put(keys.serving(self.run), record.to_bytes())


@dataclass
class Replica:
    """What one pod of a pool holds. The agent reaches its engine and the store through proxies, the tests around them."""

    kind: str
    engine: EngineProcess
    agent: AgentProcess
    engine_proxy: FaultProxy
    store_proxy: FaultProxy
    store: Store
    versions: Versions

    @property
    def label(self) -> str:
        return str(self.engine.info("weight_version"))

    @property
    def paused(self) -> bool:
        return self.engine.client.get("/ready").status_code == 503

    def tensors(self) -> dict[str, str]:
        """The engine's own checksums by name."""
        answer = self.engine.client.post("/weights_checker", json={"action": "checksum"}).json()
        return dict(answer["ranks"][0]["checksums"])

    def holds(self, version: int) -> bool:
        """Whether the engine's tensors are those of a version, by its own checksums."""
        prediction = predict(self.versions.folders[version])
        assert prediction is not None
        return prediction.differences(self.tensors()) == []

    def drawn_by(self, answer: Mapping[str, Any]) -> list[int | None]:
        """The versions that drew an answer, in order: what each label was proven to be; None for one that was not."""
        proven = self.agent.status().proven
        labels = [str(span["version"]) for span in answer["meta_info"]["weight_versions"]]
        return [version for version, _ in groupby(proven.get(label, proven_version(label)) for label in labels)]

    def gap(self) -> float:
        """Largest difference of log-probabilities between the engine's probe and transformers."""
        probed = self.agent.ask(lambda a: a.probe(Probe(token_ids=[TOKENS])))
        assert probed.weight_version == str(probed.version)
        expected = reference(self.versions.folders[probed.version], TOKENS)
        rows = zip(TOKENS[1:], probed.logprobs[0], strict=True)
        return max(abs(value - float(expected[place, token])) for place, (token, value) in enumerate(rows))

    def serves(self, version: int) -> None:
        """By the agent, by the engine's label and tensors, and by an answer."""
        status = self.agent.status()
        assert (status.version, status.ready, status.state) == (version, True, EngineState.SERVING), status.reason
        assert self.agent.ready().status_code == 200
        assert self.label == str(version)
        assert self.holds(version)
        assert self.engine.sample(TOKENS, tokens=2)["meta_info"]["weight_version"] == str(version)


def tensors_of(folder: Path) -> Tensors:
    return parse((folder / "model.safetensors").read_bytes())


def scaled(replica: Replica, factor: float, folder: Path) -> Path:
    """A good version that nobody published: v1 with other numbers."""
    import numpy as np

    shutil.copytree(replica.versions.folders[1], folder)
    tensors = tensors_of(folder)
    for tensor in tensors.values():
        tensor.data = (np.frombuffer(tensor.data, "<f4") * np.float32(factor)).tobytes()
    (folder / "model.safetensors").write_bytes(join(tensors))
    return folder


@contextmanager
def another_agent(
    replica: Replica, folder: Path, *, more: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[AgentProcess]:
    """An agent beside the first, with a buffer of its own. It reaches the store through the proxy."""
    running = AgentProcess(
        folder, replica.agent.engine_url, replica.agent.store, "engine-1", more=more, environment=environment
    )
    running.run = replica.versions.run
    try:
        yield running
    finally:
        running.child.stop()
