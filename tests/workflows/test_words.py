"""What people type and name on the command line: refused in one line, with exit code 78, before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from colchis.components.errors import BadConfig
from colchis.workflows.cli import main
from colchis.workflows.home import Home
from colchis.workflows.local.services import write_state
from colchis.workflows.options import write_text
from colchis.workflows.runs import services

BAD_NAMES = ["", "a/b", "Big", "two words", "x-", "x" * 43, "ä"]
COMMANDS = [
    ("status", "{}"),
    ("report", "{}"),
    ("stop", "{}"),
    ("skip", "{}", "--iteration", "0", "--reason", "r"),
    ("logs", "{}"),
    ("diff", "{}", "fine"),
    ("diff", "fine", "{}"),
    ("run", "run.yaml", "--run", "{}"),
    ("run", "run.yaml", "--pool", "{}"),
    ("up", "--pool", "{}"),
    ("submit", "run.yaml", "--run", "{}"),
    ("submit", "run.yaml", "--pool", "{}"),
    ("request", "run.yaml", "--run", "{}"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c))
def test_a_name_that_is_none_is_refused(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a name that becomes a path, a key or an object of Kubernetes, and fails there half an hour later."""
    monkeypatch.chdir(tmp_path)
    for name in BAD_NAMES:
        done = CliRunner().invoke(main, [word.format(name) for word in command])
        assert (done.exit_code, done.exception.__class__) == (78, SystemExit), done.output
        assert "use small letters, digits and hyphens" in done.output
        assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Fault: a traceback because a folder does not exist."""
    for path in (tmp_path, tmp_path / "no" / "x.html"):
        with pytest.raises(BadConfig, match=rf"cannot be written: .* \[{path}\]"):
            write_text(path, "x")


def test_services_that_are_up_are_not_taken_for_others(tmp_path: Path) -> None:
    """Fault: a run on other engines than the ones it was asked to use, without a word."""
    home = Home(tmp_path)
    environment = {
        "COLCHIS_S3_ENDPOINT": "http://127.0.0.1:1",
        "COLCHIS_S3_BUCKET": "b",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "s",
        "COLCHIS_ENGINES": "http://127.0.0.1:2",
        "COLCHIS_AGENT_TOKEN": "t",
        "COLCHIS_KEPT_POOL": "main",
        "COLCHIS_KEPT_ENGINES": "2",
        "COLCHIS_KEPT_ENGINE": "embedded",
    }
    write_state(home.services, {"pid": os.getpid(), "kept": True, "environment": environment})
    for asked in ({"engines": 7}, {"kind": "sglang"}, {"pool_name": "other"}):
        with (
            pytest.raises(BadConfig, match="what is up is pool main, engines 2, engine embedded"),
            services(home, "a test", **asked),  # type: ignore[arg-type]
        ):
            pass
    with services(home, "a test", "main", 2, "embedded") as (_, pool):
        assert pool.name == "main"


def test_a_home_is_owned_until_its_services_have_ended(tmp_path: Path) -> None:
    """Fault: `colchis down` that says so while the next run would still find the home in use."""
    home = Home(tmp_path)
    assert not home.is_locked()
    with home.locked("a test"):
        assert home.is_locked()
    assert not home.is_locked()
