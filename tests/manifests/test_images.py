"""Dockerfiles: hadolint's rules, and what Colchis asks of an image."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.harness import build
from tests.manifests.conftest import REPOSITORY

IMAGES = ("stage", "trainer", "engine-embedded")
TOOLS = ("gcc", "g++", "build-essential", "python3-pip", "python3-dev", "git", "curl", "make")


@pytest.fixture(params=IMAGES)
def image(request: pytest.FixtureRequest) -> Path:
    """The folder of one image."""
    return REPOSITORY / "images" / str(request.param)


def final_stage(dockerfile: str) -> str:
    """What the image itself is made by: the text from the last FROM on."""
    return dockerfile[dockerfile.rindex("\nFROM ") :]


def test_hadolint_has_no_finding(image: Path) -> None:
    """Fault: what hadolint's rules say, but for the versions of Debian packages (said why in the file)."""
    command = [str(Path(sys.executable).with_name("hadolint")), "--format", "json", str(image / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True)
    found = [f"{f['line']}: {f['code']} {f['message']}" for f in json.loads(done.stdout)]
    assert (found, done.returncode) == ([], 0), done.stderr
    ignored = re.findall(r"hadolint ignore=(\S+)", (image / "Dockerfile").read_text())
    assert set(ignored) == {"DL3008"}


def test_the_image_runs_as_nobody_in_particular(image: Path) -> None:
    """Fault: an image that `restricted` refuses, or that says nothing of where it comes from."""
    final = final_stage((image / "Dockerfile").read_text())
    assert re.findall(r"^USER (.*)$", final, re.MULTILINE) == ["10001:10001"]
    for label in ("title", "version", "revision", "licenses"):
        assert f"org.opencontainers.image.{label}=" in final
    assert "COLCHIS_COMMIT=${COMMIT}" in final


def test_the_final_stage_has_no_build_tools(image: Path) -> None:
    """Fault: a compiler or pip in what runs."""
    words = shlex.split(final_stage((image / "Dockerfile").read_text()), comments=True)
    assert not set(words) & set(TOOLS)
    assert "--without-pip" in (image / "Dockerfile").read_text()


def test_bases_have_plain_names(image: Path) -> None:
    """Fault: an image that only one registry has."""
    text = (image / "Dockerfile").read_text()
    assert re.findall(r"^ARG BASE=(.*)$", text, re.MULTILINE) == ["debian:bookworm-slim"]
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["${BASE}", "${BASE}"]


def test_packages_are_those_of_the_tests(image: Path) -> None:
    """Fault: an image with other versions than the ones that were tested, or one of them unpinned."""
    tested = pins(REPOSITORY / "requirements/dev.txt")
    own = pins(image / "requirements.txt")
    assert len(own) > 40
    assert {name: version for name, version in own.items() if tested.get(name) != version} == {}
    text = (image / "requirements.txt").read_text()
    assert text.count("--hash=sha256:") >= len(own)
    assert "://" not in re.sub(r"#.*", "", text)


def test_the_stage_image_has_no_torch() -> None:
    """Fault: six gigabytes for stages that compute nothing."""
    own = pins(REPOSITORY / "images/stage/requirements.txt")
    assert not {"torch", "transformers", "triton", "hera"} & set(own)
    assert not [name for name in own if name.startswith("nvidia-")]
    assert {"boto3", "fastapi", "reasoning-gym"} <= set(own)


def test_the_context_is_what_the_dockerfile_copies(image: Path) -> None:
    """Fault: a build that sends the whole checkout, or lacks a file."""
    ignored = (image / "Dockerfile.dockerignore").read_text().split()
    copied = re.findall(r"^COPY (?!--from)(\S+) ", (image / "Dockerfile").read_text(), re.MULTILINE)
    assert ignored[0] == "**"
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == set(copied)
    assert all((REPOSITORY / source).exists() for source in copied)


def test_the_test_clusters_image_behaves_alike() -> None:
    """Fault: a test cluster that proves something about another image."""
    final = final_stage((REPOSITORY / "images/stage/Dockerfile").read_text())
    assert f"USER {build.STAGE_USER}:" in final
    for name in ("HOME", "PYTHONDONTWRITEBYTECODE"):
        assert f"{name}={build.STAGE_ENVIRONMENT[name]}" in final


def test_a_program_says_which_version_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: an image of which nobody can say what is in it."""
    monkeypatch.setenv("COLCHIS_COMMIT", "0123abc")
    command = [sys.executable, "-m", "colchis.components", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"colchis \d+\.\d+\.\d+, commit 0123abc\n", done.stdout)


def pins(path: Path) -> dict[str, str]:
    """name -> version of the packages in a file of pinned requirements."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", path.read_text(), re.MULTILINE))
