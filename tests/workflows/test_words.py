"""What people type and name on the command line: refused in one line, with exit code 78, before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from colchis.components.errors import BadConfig
from colchis.workflows.cli import main
from colchis.workflows.home import Home, started_at
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
    write_state(
        home.services, {"pid": os.getpid(), "since": started_at(os.getpid()), "kept": True, "environment": environment}
    )
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


@pytest.mark.parametrize("services", ["{", "[]", '{"pid": 1}'])
def test_a_damaged_note_of_services_is_named(tmp_path: Path, services: str) -> None:
    home = Home(tmp_path)
    home.services.write_text(services)
    with pytest.raises(BadConfig, match=r"cannot be read .*services\.json.*remove it"):
        home.state()


def test_services_of_a_process_that_ended_are_not_those_of_the_next_one_of_its_number(tmp_path: Path) -> None:
    """Fault: a command that waits for a store that nobody runs, because the number of its process is taken again."""
    home = Home(tmp_path)
    write_state(home.services, {"pid": os.getpid(), "since": "1", "kept": True, "environment": {}})
    assert home.state() is None


def test_a_home_that_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    config = Path(__file__).parents[2] / "examples" / "arithmetic" / "run.yaml"
    for home in ("file", "file/below"):
        monkeypatch.setenv("COLCHIS_HOME", str(tmp_path / home))
        said = CliRunner().invoke(main, ["run", str(config)])
        assert said.exit_code == 78, said.output
        assert "cannot be the home folder" in said.stderr
    monkeypatch.setenv("COLCHIS_HOME", "")
    assert Home.find().folder.name == ".colchis"


def test_a_path_that_is_something_else_is_no_bug(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = CliRunner().invoke(main, ["render", "--to", str(tmp_path / "file")])
    assert said.exit_code == 78, said.output
    assert "name another file or folder" in said.stderr


def test_a_manifest_that_is_no_text_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"a: \xff\n")
    said = CliRunner().invoke(main, ["lint", str(tmp_path / "a.yaml")])
    assert said.exit_code == 65
    assert "utf-8" in said.stdout


def test_what_ctrl_c_ends_says_so_by_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("colchis.workflows.services.end_services", interrupted)
    assert CliRunner().invoke(main, ["down"]).exit_code == 130
