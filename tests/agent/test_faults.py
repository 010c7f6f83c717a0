"""Processes die at the worst moments: no pause outlives them, and no engine is believed that was not proven."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from colchis.components.agent.agent import AgentSettings
from colchis.components.errors import BadConfig, ColchisError, PeerUnavailable
from colchis.components.store import Store, StoreSettings, keys, upload_input
from colchis.components.weights.protocol import EngineState
from tests.agent.conftest import DEADLINE_S, AgentProcess, EngineProcess, Versions, declare
from tests.faults import Fault, FaultProxy
from tests.waiting import eventually
from tests.weights.models import RUN, config_of, publish_version, write_model


class Gate:
    """A TCP proxy in front of the engine or the store that can hold back what follows a given text."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.held = threading.Event()
        self.open = threading.Event()
        self._marks: tuple[bytes, ...] = ()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self, *marks: bytes) -> None:
        """Stop every request that contains one of the marks, until `open` is set."""
        self.held.clear()
        self.open.clear()
        self._marks = marks

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self.target)
            except OSError:
                client.close()
                continue
            threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, checked: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if checked and any(mark in data for mark in self._marks):
                    self.held.set()
                    self.open.wait()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._marks = ()
        self.open.set()
        self._listener.close()


@pytest.fixture
def gate(engine: EngineProcess) -> Iterator[Gate]:
    gate = Gate(("127.0.0.1", engine.port))
    yield gate
    gate.close()


@pytest.fixture
def gated_agent(gate: Gate, store_settings: StoreSettings, tmp_path: Path) -> Iterator[AgentProcess]:
    """An agent that reaches its engine through the gate."""
    agent = AgentProcess(tmp_path / "gated", f"http://127.0.0.1:{gate.port}", store_settings)
    yield agent
    agent.child.stop()


def in_background(work: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        try:
            work()
        except ColchisError:
            return  # the call that is cut off; what the process did is what the test looks at

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_label_that_the_agent_did_not_set_is_not_believed(
    versions: Versions, agent: AgentProcess, engine: EngineProcess
) -> None:
    """Catches trust in a free text: anybody may write weight_version."""
    agent.bring(0)
    engine.post("/update_weight_version", {"new_version": "1", "abort_all_requests": False})
    eventually(lambda: agent.status().version is None, "a foreign label is noticed")
    assert agent.ready().status_code == 503


def test_a_restarted_agent_believes_the_engines_own_tensors(
    versions: Versions, agent: AgentProcess, engine: EngineProcess
) -> None:
    """Catches an agent that needs a reload after its own restart, and one that takes a label's word for it."""
    agent.bring(1)
    boot = agent.status().boot_id
    agent.kill()
    agent.start()
    status = agent.status()
    assert (status.version, status.ready, status.boot_id != boot) == (1, True, True)
    agent.kill()
    # other weights under the same label, while no agent looks
    folder = str(versions.folders[0])
    engine.post("/update_weights_from_disk", {"model_path": folder, "weight_version": "1"})
    agent.start()
    status = agent.status()
    assert (status.version, status.ready) == (None, False)


def test_agent_killed_while_it_fetches(
    versions: Versions, engine: EngineProcess, store_settings: StoreSettings, tmp_path: Path
) -> None:
    """kill -9 in the middle of a fetch: catches a half-filled folder that is taken for a version, or is in the way of one."""
    endpoint = urlsplit(store_settings.endpoint)
    assert endpoint.hostname
    assert endpoint.port
    gate = Gate((endpoint.hostname, endpoint.port))
    gate.hold(b"weights/model.safetensors")
    gated = replace(store_settings, endpoint=f"http://127.0.0.1:{gate.port}")
    agent = AgentProcess(tmp_path / "gated", engine.url, gated)
    try:
        in_background(lambda: agent.prepare(1))
        assert gate.held.wait(DEADLINE_S)
        half = agent.staged(1).with_name("v00000001.filling")
        assert half.is_dir()
        agent.kill()
        gate.close()
        agent.store = store_settings
        agent.start()
        assert agent.status().prepared == {}
        assert not agent.prepare(1).repeated
        assert agent.status().prepared == {agent.run: [1]}
        assert not half.exists()
    finally:
        agent.child.stop()


def test_agent_killed_while_the_engine_is_paused(
    versions: Versions, gated_agent: AgentProcess, gate: Gate, engine: EngineProcess
) -> None:
    """kill -9 between pause and load: the watchdog continues the engine, and nobody believes its label."""
    agent = gated_agent
    agent.bring(0)
    agent.prepare(1)
    gate.hold(b"/update_weights_from_disk")
    in_background(lambda: agent.activate(1))
    assert gate.held.wait(DEADLINE_S)
    assert engine.paused()
    assert engine.label() == "unproven-1"
    lease_s = agent.status().pause_lease_s
    assert lease_s is not None
    assert lease_s > 0
    agent.kill()
    eventually(lambda: not engine.paused(), "the watchdog continues the engine")
    gate.close()
    agent.engine_url = engine.url
    agent.start()
    assert agent.status().version is None
    assert agent.ready().status_code == 503
    assert not (agent.staging / "pause.json").exists()
    agent.activate(1)  # staged by the agent before
    assert (agent.status().version, engine.label()) == (1, "1")


def test_next_agent_ends_a_pause_when_the_watchdog_died_too(
    versions: Versions, agent: AgentProcess, engine: EngineProcess
) -> None:
    """A container that is killed takes agent and watchdog; the file in the staging folder is what is left."""
    agent.bring(0)
    agent.kill()
    (agent.staging / "pause.json").write_text("{}")
    engine.post("/pause_generation", {"mode": "retract"})
    agent.start()
    eventually(lambda: not engine.paused(), "the next agent continues the engine")
    assert agent.status().version == 0


def test_sigterm_undoes_a_pause(
    versions: Versions, gated_agent: AgentProcess, gate: Gate, engine: EngineProcess
) -> None:
    """Catches a rolling update of the agent that leaves the engine paused for ever."""
    agent = gated_agent
    agent.bring(0)
    agent.prepare(1)
    gate.hold(b"/update_weights_from_disk")
    in_background(lambda: agent.activate(1))
    assert gate.held.wait(DEADLINE_S)
    assert engine.paused()
    agent.child.process.send_signal(signal.SIGTERM)
    eventually(lambda: not engine.paused(), "the agent continues the engine at the signal")
    gate.open.set()
    assert agent.child.process.wait(DEADLINE_S) == 143
    eventually(lambda: not engine.paused(), "and nothing pauses it afterwards")
    assert engine.generate()["meta_info"]["finish_reason"]["type"] == "length"


def test_engine_killed_during_an_activation(
    versions: Versions, gated_agent: AgentProcess, gate: Gate, engine: EngineProcess
) -> None:
    """Catches a version that is believed although the engine died under the load."""
    agent = gated_agent
    agent.bring(0)
    agent.prepare(1)
    gate.hold(b"/update_weights_from_disk")
    errors: list[ColchisError] = []

    def activate() -> None:
        try:
            agent.activate(1)
        except ColchisError as error:
            errors.append(error)

    thread = threading.Thread(target=activate)
    thread.start()
    assert gate.held.wait(DEADLINE_S)
    engine.child.stop(grace_s=0)
    gate.open.set()
    thread.join(DEADLINE_S)
    assert [type(e) for e in errors] == [PeerUnavailable]
    assert agent.status().version is None
    gate.hold()
    engine.start()
    agent.bring(1)
    assert (agent.status().version, engine.label()) == (1, "1")


def test_engine_killed_in_the_middle_of_a_load(
    store: Store, start_agent: Callable[..., AgentProcess], tmp_path: Path
) -> None:
    """Catches the same where the engine has read a part of the version: a model that takes a while to load."""
    config = config_of(hidden_size=768, intermediate_size=3072, num_hidden_layers=3, vocabulary=4096)
    folders = [write_model(tmp_path / f"v{version}", config, seed=version) for version in range(2)]
    model = upload_input(store, folders[0])
    for version, folder in enumerate(folders):
        publish_version(store, folder, model=model, version=version)
    engine = EngineProcess(tmp_path)
    agent = start_agent(engine)
    try:
        agent.bring(0)
        agent.prepare(1)
        file = str(agent.staged(1) / "model.safetensors")
        maps = Path(f"/proc/{engine.child.process.pid}/maps")
        with ThreadPoolExecutor(1) as pool:
            activation = pool.submit(agent.activate, 1)
            until = time.monotonic() + DEADLINE_S
            while file not in maps.read_text():
                assert time.monotonic() < until, "the load did not begin"
            engine.child.stop(grace_s=0)
            with pytest.raises(PeerUnavailable):
                activation.result()
        assert "unproven-1" not in (tmp_path / "engine.log").read_text(), "it was loaded before it was killed"
        assert agent.status().version is None
        engine.start()
        agent.bring(1)
        assert (agent.status().version, engine.label()) == (1, "1")
    finally:
        engine.child.stop()


def test_a_refused_load_keeps_the_old_version_by_proof(
    versions: Versions, agent: AgentProcess, engine: EngineProcess
) -> None:
    """The engine refuses what it is given: not ready, with the reason, and the old name only because it is proven."""
    agent.bring(0)
    before = engine.checksum()
    agent.prepare(1)
    config = agent.staged(1) / "config.json"
    good = config.read_text()
    config.write_text(good.replace('"hidden_size": 32', '"hidden_size": 40'))
    with pytest.raises(ColchisError, match=r"refused|answers 400"):
        agent.activate(1)
    status = agent.status()
    assert (status.state, status.version, status.ready) == (EngineState.FAILED, 0, False)
    assert status.reason
    assert (engine.label(), engine.checksum(), engine.paused()) == ("0", before, False)
    config.write_text(good)
    agent.activate(1)
    assert (agent.status().version, agent.ready().status_code) == (1, 200)


def test_one_agent_per_folder(agent: AgentProcess, engine: EngineProcess, store_settings: StoreSettings) -> None:
    """Catches two writers of one buffer."""
    with pytest.raises(PeerUnavailable, match="ended with 78"):
        AgentProcess(agent.folder, engine.url, store_settings)
    agent.kill()
    agent.start()


def test_a_store_out_of_reach_does_not_unready_an_engine(
    store: Store, versions: Versions, engine: EngineProcess, proxy: FaultProxy, through: Store, tmp_path: Path
) -> None:
    """Catches readiness that hangs on the store: engines go on serving what was proven."""
    agent = AgentProcess(tmp_path / "through", engine.url, through.settings)
    try:
        proof = agent.bring(0)
        declare(store, 0, proof.weights_digest)
        eventually(lambda: agent.ready().status_code == 200, "what is declared is ready")
        away = proxy.add(Fault("GET", r"/serving\.json", "reset", times=10**6))
        asked = 0
        while away.applied < 3:  # each has a try or more of its own
            assert agent.ready().status_code == 200
            asked += 1
        assert asked > 1
        proxy.clear()
        declare(store, 1, proof.weights_digest)
        eventually(lambda: agent.ready().status_code == 503, "it is back, and declares another version")
    finally:
        agent.child.stop()


def test_a_damaged_declaration_unreadies_an_engine(store: Store, versions: Versions, agent: AgentProcess) -> None:
    """Catches an engine that takes traffic while nobody can say which version is declared."""
    agent.bring(0)
    store.put(keys.serving(RUN), b"not a record")
    eventually(lambda: agent.ready().status_code == 503, "a record that is none is refused")
    store.delete(keys.serving(RUN))
    eventually(lambda: agent.ready().status_code == 200, "no record: the engine's own proof decides")


def test_no_token_no_agent(engine: EngineProcess, store_settings: StoreSettings, tmp_path: Path) -> None:
    from colchis.components.agent.app import serve

    with pytest.raises(BadConfig, match="without a token"):
        serve(AgentSettings(engine.url, "e", tmp_path), store_settings, host="127.0.0.1", port=0, token="")
