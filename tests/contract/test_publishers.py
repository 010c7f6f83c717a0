"""Publishers and a store on bad days, and replicas that do not fare alike, with either engine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from colchis.components.errors import BadData, PeerUnavailable
from colchis.components.records.weights import WeightsManifest
from colchis.components.store import keys
from colchis.components.weights import Agents, activate_all, prepare_all, read_manifest
from colchis.components.weights.manifest import build
from colchis.components.weights.publish import publish
from tests.agent.conftest import DEADLINE_S, TOKEN
from tests.contract.replica import TOKENS, Replica, another_agent, holding, scaled, tensors_of
from tests.faults import Fault
from tests.run.test_wrong_weights import join
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


def test_two_publishers_of_one_version(replica: Replica, tmp_path: Path) -> None:
    """Fault: two histories of one run, of which one replica serves the one and another the other."""
    run, store = replica.versions.run, replica.store
    folders = [scaled(replica, 1 + number / 8, tmp_path / str(number)) for number in range(4)]
    manifests: list[WeightsManifest] = []
    for number, folder in enumerate(folders):
        path = folder / "model.safetensors"
        payload = store.upload(f"{keys.iteration_prefix(run, 2)}train/attempts/{number}/weights/{path.name}", path)
        parts = {"run": run, "version": 2, "base_version": 1, "step": 2, "model": replica.versions.model}
        manifests.append(build(**parts, kind="full", files=[(payload, path)]))  # type: ignore[arg-type]

    def try_to(number: int) -> bool:
        try:
            publish(store, manifests[number])
        except BadData as refusal:
            assert "is published with other content" in str(refusal)  # noqa: PT017
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(try_to, range(4)))
    assert sum(won) == 1
    winner = won.index(True)
    assert try_to(winner), "the winner may say it again"
    replica.versions.folders[2] = folders[winner]
    assert replica.agent.bring(2).weights_digest == manifests[winner].weights_digest
    replica.serves(2)


PUBLISHER = """
import sys
from pathlib import Path
from colchis.components.store import Store, StoreSettings
from tests.weights.models import publish_version
publish_version(Store(StoreSettings.from_environment()), Path(sys.argv[1]), model=sys.argv[2], version=2, run=sys.argv[3])
"""


def test_a_publisher_dies_between_payload_and_manifest(replica: Replica, tmp_path: Path) -> None:
    """Fault: half a version that is served, or one that is never found because it was asked for too early."""
    run, folder = replica.versions.run, scaled(replica, 1.5, tmp_path / "v2")
    with holding(replica.store_proxy, "PUT", "weights/v00000002/manifest.json") as hold:
        environment = {**os.environ, **replica.agent.store.to_environment()}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        argv = [sys.executable, "-c", PUBLISHER, str(folder), replica.versions.model, run]
        publisher = subprocess.Popen(argv, env=environment)
        hold.wait()
        replica.store_proxy.add(Fault("PUT", "weights/v00000002/manifest.json", "reset"))
        publisher.kill()
        publisher.wait()
        assert list(replica.store.list(keys.iteration_prefix(run, 2))), "the payload is there"
        with pytest.raises(BadData, match="no such object"):
            replica.agent.prepare(2)
        replica.serves(0)
    hold.wait_until_over()
    replica.store.delete(keys.weights_manifest(run, 2))  # what the proxy held may have arrived after all
    replica.versions.publish(2, folder)
    assert replica.agent.bring(2).checksums_equal
    replica.serves(2)


def test_the_store_is_slow_for_one_replica(replica: Replica, tmp_path: Path) -> None:
    """Fault: a reload that goes on without the slow one, stops the others meanwhile, or hides which one it waits for."""
    run, store = replica.versions.run, replica.store
    tensors = tensors_of(replica.versions.folders[1])
    names, files = sorted(tensors), []
    for number in range(3):
        path = tmp_path / f"model-{number + 1:05d}-of-00003.safetensors"
        path.write_bytes(join({name: tensors[name] for name in names[number::3]}))
        key = f"{keys.iteration_prefix(run, 2)}train/attempts/x/weights/{path.name}"
        files.append((store.upload(key, path), path))
    parts = {"run": run, "version": 2, "base_version": 1, "step": 2, "model": replica.versions.model}
    manifest = publish(store, build(**parts, kind="full", files=files))  # type: ignore[arg-type]
    with another_agent(replica, tmp_path / "slow") as slow:
        urls = [replica.agent.url, slow.url]
        # the first agent is not behind the slow way: it is asked before, and has what it needs
        replica.agent.prepare(2)
        replica.store_proxy.add(Fault("GET", r"train/attempts/x/weights/", "delay", seconds=0.4, times=1000))

        async def prepare(deadline_s: float) -> list[object]:
            async with Agents(urls, TOKEN) as agents:
                return list(await prepare_all(agents, manifest, deadline_s=deadline_s))

        with ThreadPoolExecutor(1) as pool:
            slowly = pool.submit(lambda: asyncio.run(prepare(0.7)))
            while not slowly.done():
                answer = replica.engine.sample(TOKENS, tokens=4)
                assert answer["meta_info"]["weight_version"] == "0"
            with pytest.raises(PeerUnavailable, match=rf"boundary 3 \(transfer\).* failed at 1 of 2 .*{slow.url}") as e:
                slowly.result()
        assert replica.agent.url not in str(e.value)
        replica.serves(0)
        replica.store_proxy.clear()
        assert len(asyncio.run(prepare(DEADLINE_S))) == 2
        assert slow.status().prepared == {run: [2]}
    replica.versions.folders[2] = replica.versions.folders[1]
    assert replica.agent.activate(2).checksums_equal
    replica.serves(2)


def test_one_replica_of_several_does_not_come_through_the_load(replica: Replica) -> None:
    """Fault: a version that takes traffic on one replica while another has not got it (a router that updates one worker,
    sglang#4282); nothing is declared, so the one that has it is not ready."""
    replica.versions.declare(0)
    replica.agent.prepare(1)
    manifest = read_manifest(replica.store, replica.versions.run, 1)
    gone = "http://127.0.0.1:9"

    async def activate(urls: list[str], deadline_s: float) -> list[object]:
        async with Agents(urls, TOKEN) as agents:
            return list(await activate_all(agents, manifest, deadline_s=deadline_s))

    with pytest.raises(PeerUnavailable, match=rf"boundary 4 \(load\).* failed at 1 of 2 engines: {gone}"):
        asyncio.run(activate([replica.agent.url, gone], 2.0))
    answer = replica.agent.ready()
    assert (answer.status_code, answer.text) == (503, f"serves v1, run '{replica.versions.run}' declares v0")
    assert asyncio.run(activate([replica.agent.url], DEADLINE_S))
    replica.versions.declare(1)
    eventually(lambda: replica.agent.ready().status_code == 200, "what is declared is ready")
    replica.serves(1)
