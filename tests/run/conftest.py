"""A run small enough to be killed often: a random model of two layers, sums that it never solves, and a grader that is
content with any digit, so that rewards vary."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from colchis.components.store import Store, StoreSettings
from colchis.workflows.local.weed import Weed
from tests.run.kept import DEADLINE_S, Account, Guest, Services, keep_services

CONFIG = """
model: {source: "file:model"}
environment: {kind: dataset, source: "file:rows.jsonl", heldout_rows: 4}
rollout: {prompts: 4, group_size: 4, max_new_tokens: 3}
grader: {face: rule, pattern: "[0-9]", tolerance: 5}
trainer: {learning_rate: 0.01}
evaluation: {prompts: 4}
loop: {iterations: 2, seed: 3}
"""


@dataclass(frozen=True)
class Project:
    """A folder with a configuration, and a home of its own."""

    folder: Path
    home: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "COLCHIS_HOME": str(self.home), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "colchis.workflows.cli", *args]

    def colchis(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run one command to its end."""
        return subprocess.run(
            self.command(*args), env=self.environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        """`colchis run` of this project."""
        return self.colchis("run", str(self.folder / "run.yaml"), "--run", "r", *args)

    def start(self, *args: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """`colchis run` in the background, in a process group of its own, with `environment` added."""
        return subprocess.Popen(
            self.command("run", str(self.folder / "run.yaml"), "--run", "r", *args),
            env={**self.environment, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def status(self) -> dict[str, Any]:
        done = self.colchis("status", "r", "--last", "100", "--json")
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def digests(self) -> list[str]:
        """Weights digest of every version, in order: what must not depend on how often something was killed."""
        return [s["weights_digest"] for s in self.status()["summaries"]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 with one token per character, made in a process of its own: pytest stays free of torch."""
    folder = tmp_path_factory.mktemp("model") / "model"
    script = f"""
import tokenizers, torch
from transformers import Qwen2Config, Qwen2ForCausalLM
torch.manual_seed(0)
characters = [chr(code) for code in range(32, 64)]
vocabulary = {{"<pad>": 0, "<eos>": 1}} | {{c: i + 2 for i, c in enumerate(characters)}}
tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
tokenizer.decoder = tokenizers.decoders.Fuse()
tokenizer.add_special_tokens(["<pad>", "<eos>"])
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0))
model.save_pretrained({str(folder)!r})
tokenizer.save({str(folder / "tokenizer.json")!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=DEADLINE_S, capture_output=True)
    return folder


@pytest.fixture
def project(model: Path, tmp_path: Path) -> Project:
    """A fresh project with nothing run yet."""
    return make_project(model, tmp_path)


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose run of two iterations ended undisturbed."""
    project = make_project(model, tmp_path_factory.mktemp("finished"))
    done = project.run()
    assert done.returncode == 0, done.stdout + done.stderr
    return project


def make_project(model: Path, folder: Path) -> Project:
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "model").symlink_to(model)
    rows = [{"prompt": f"{a}+{b}=", "answer": "4.5"} for a in range(6) for b in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Project(folder, folder / "home")


@pytest.fixture
def opened(finished: Project) -> Iterator[Store]:
    """The store of the finished run."""
    with Weed(finished.home / "store") as weed:
        yield Store(weed.settings)


def settings_of(project: Project) -> StoreSettings:
    """The store of a run that goes on."""
    state = json.loads((project.home / "services.json").read_text())
    return StoreSettings.from_environment(state["environment"])


def descendants(pid: int) -> dict[int, str]:
    """Every process below `pid` that lives now, with its command line."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if stat[0] != "Z":
                parents[int(entry.name)] = (int(stat[1]), words)
    found: dict[int, str] = {}
    front = {pid}
    while front:
        front = {child for child, (parent, _) in parents.items() if parent in front and child not in found}
        found |= {child: parents[child][1] for child in front}
    return found


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """One store and two engines for all tests that break them from outside; `guest` makes them whole again."""
    with keep_services(tmp_path_factory.mktemp("kept")) as running:
        yield running


@pytest.fixture(scope="session")
def calm(services: Services, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Account:
    """What an undisturbed run of the same configuration comes to."""
    guest = Guest(services, make_project(model, tmp_path_factory.mktemp("calm")), "calm")
    guest.announce()
    code, said = guest.finish()
    assert code == 0, said
    account = Account.of(services.store, "calm")
    assert len(account.digests) == 2
    assert len(account.trajectories) == 32
    return account


@pytest.fixture
def guest(services: Services, calm: Account, project: Project) -> Iterator[Guest]:
    """A run that has not begun, on services that are whole."""
    services.repair()
    guest = Guest(services, project, f"r-{uuid.uuid4().hex[:8]}")
    guest.announce()
    yield guest
    guest.close()
