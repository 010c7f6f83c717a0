"""The local store: only ours, only here, and nothing lost when anything is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from colchis.components.errors import BadConfig, PeerUnavailable
from colchis.components.store import Store, StoreSettings
from colchis.workflows.local import weed as weed_module
from colchis.workflows.local.weed import SOCKETS, Weed

PARENT = """
    import sys, threading
    from pathlib import Path
    from colchis.workflows.local.weed import Weed
    weed = Weed(Path(sys.argv[1]))
    thread = threading.Thread(target=weed.start)  # a thread that ends before the process does
    thread.start()
    thread.join()
    print(weed.pid, flush=True)
    sys.stdin.read()
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def tcp_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_data_survive_stop_and_kill(tmp_path: Path) -> None:
    weed = Weed(tmp_path / "weed")
    first = weed.start()
    Store(first).put("stopped", b"1")
    weed.stop()
    second = weed.start()
    Store(second).put("killed", b"2")
    weed.kill()
    with weed:
        assert weed.settings == first == second  # same address and credentials: waiting clients find it again
        assert Store(weed.settings).get("stopped").data == b"1"
        assert Store(weed.settings).get("killed").data == b"2"
        assert StoreSettings.from_environment(weed.environment()) == weed.settings
    assert weed.pid is None
    weed.stop()


def test_nothing_of_it_stays_in_tmp(tmp_path: Path) -> None:
    """Fault: a socket per server and start, for ever; also when it is killed, the next start or stop removes them."""
    weed = Weed(tmp_path)
    weed.start()
    port = weed.settings.endpoint.rpartition(":")[2]
    assert list(SOCKETS.glob(f"seaweedfs-*-{port}.sock")), "weed keeps its sockets elsewhere: see SOCKETS"
    weed.kill()
    assert not list(SOCKETS.glob(f"seaweedfs-*-{port}.sock"))


def test_ports_that_are_taken_are_drawn_again(tmp_path: Path) -> None:
    """Another program may have a port of ours when we come back: data and credentials stay."""
    with Weed(tmp_path / "weed") as weed:
        first = weed.settings
        Store(first).put("key", b"data")
    import socket

    with socket.socket() as taker:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taker.bind(("127.0.0.1", int(first.endpoint.rpartition(":")[2])))
        taker.listen()
        with weed:
            assert weed.settings.endpoint != first.endpoint
            assert Store(weed.settings).get("key").data == b"data"


def test_a_port_taken_while_it_starts_costs_another_start(tmp_path: Path) -> None:
    """Fault: a run that does not start since some connection got a port between its choice and its use."""
    ports_file = tmp_path / "ports.json"
    with socket.socket() as intruder:

        def take_one() -> None:
            while not tcp_open(json.loads(ports_file.read_text())["master"] if ports_file.exists() else 1):
                time.sleep(0.001)
            intruder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            intruder.bind(("127.0.0.1", json.loads(ports_file.read_text())["filer.grpc"]))
            intruder.listen()

        thread = threading.Thread(target=take_one)
        thread.start()
        with Weed(tmp_path) as weed:
            thread.join()
            taken = intruder.getsockname()[1]
            assert f":{taken}: bind: address already in use" in weed.log.read_text()  # the fault did happen
            assert taken not in json.loads(ports_file.read_text()).values()
            Store(weed.settings).put("key", b"data")


def test_it_is_reachable_only_from_here_and_only_with_credentials(weed: Weed) -> None:
    listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    ours = [line.split()[3] for line in listening.splitlines() if f"pid={weed.pid}," in line]
    assert ours
    assert all(address.startswith("127.0.0.1:") for address in ours)
    with pytest.raises(BadConfig, match="AWS_ACCESS_KEY_ID"):
        Store(replace(weed.settings, access_key="any")).list("")
    command = Path(f"/proc/{weed.pid}/cmdline").read_bytes().decode().split("\0")
    assert "-master.telemetry=false" in command
    assert weed.settings.secret_key not in " ".join(command)
    for name in ("identities.json", "ports.json"):
        assert (weed.folder / name).stat().st_mode & 0o077 == 0


def test_one_process_per_folder(weed: Weed) -> None:
    with pytest.raises(BadConfig, match=f"in use by process {os.getpid()}"):
        Weed(weed.folder).start()
    with pytest.raises(BadConfig, match="running already"):
        weed.start()
    Store(weed.settings).put("probes/still-there", b"")


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_it_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    """A killed launcher must leave no server behind, and the folder free; a thread that ends must not take it along."""
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(tmp_path / "weed")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": "src"},
    )
    assert parent.stdout
    assert parent.stdin
    pid = int(parent.stdout.readline())
    time.sleep(0.2)
    assert alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline_s = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < deadline_s, "weed outlives its parent"
        time.sleep(0.02)
    with Weed(tmp_path / "weed") as again:
        Store(again.settings).put("key", b"data")
    parent.stdin.close()
    parent.stdout.close()


def test_no_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(weed_module.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(BadConfig, match="pip install"):
        Weed(tmp_path / "weed").start()


def test_a_start_that_fails_shows_the_log(tmp_path: Path) -> None:
    """Ended at once, for a reason that weed prints before a stack of each goroutine; the folder is free again afterwards."""
    folder = tmp_path / "weed"
    folder.mkdir()
    (folder / "data").mkdir()
    (folder / "data" / "filerldb2").write_text("in the way")
    broken = Weed(folder, start_s=5.0)
    with pytest.raises(PeerUnavailable, match=r"filerldb2 Writable: Not a valid folder.*weed\.log"):
        broken.start()
    (folder / "data" / "filerldb2").unlink()
    with Weed(folder):
        pass
