"""`colchis up` and `colchis down`: services that outlive a command, and end when they are told to."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from colchis.workflows.home import Home
from tests.run.conftest import Project, descendants
from tests.run.test_kills import is_zombie


def test_services_are_kept_found_and_ended(project: Project) -> None:
    """Fault: services that never hear of their end (and are killed, one grace period after the other), or outlive it; a
    run on other engines than it asked for; `down` before they are gone."""
    up = project.colchis("up", "--detach", "--engines", "1")
    assert up.returncode == 0, up.stderr
    home = Home(project.home)
    state = home.state()
    assert state is not None
    services = descendants(state["pid"])
    assert len(services) >= 3, services
    for pid in services:
        masks = dict(
            line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "Sig" in line
        )
        assert not int(masks["SigBlk"], 16) >> (signal.SIGTERM - 1) & 1, services[pid]
    refused = project.run("--engines", "3")
    assert refused.returncode == 78
    assert "what is up is pool main, engines 1, engine embedded" in refused.stderr
    listed = project.colchis("runs", "--json")
    assert (listed.returncode, json.loads(listed.stdout)) == (0, [])

    down = project.colchis("down")
    assert (down.returncode, down.stdout) == (0, "down\n"), down.stderr
    assert not home.is_locked()
    assert not [pid for pid in services if Path(f"/proc/{pid}").exists() and not is_zombie(pid)]
    assert project.colchis("down").stdout == "nothing was up\n"
