"""What kustomize makes of each overlay, with fresh keys in place of the files that git does not have."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from colchis.workflows.documents import Document, parse
from tests.cluster.harness import build

REPOSITORY = Path(__file__).parents[2]
MANIFESTS = REPOSITORY / "manifests"
OVERLAYS = tuple(sorted(p.parent.name for p in (MANIFESTS / "overlays").glob("*/kustomization.yaml")))
VARIANTS = {
    "dev-with-minio": ("kustomization.yaml", "components/seaweedfs", "components/minio"),
    "dev-with-direct-transfer": (
        "kustomization.yaml",
        "../../components/seaweedfs",
        "../../components/seaweedfs, ../../components/direct-transfer",
    ),
    "dev-with-locks": (
        "pool-main/kustomization.yaml",
        "../../../components/pool-embedded",
        "../../../components/pool-embedded, ../../../components/lock-embedded",
    ),
    "prod-with-locks": (
        "pool-main/kustomization.yaml",
        "../../../components/pool-sglang",
        "../../../components/pool-sglang, ../../../components/lock-sglang",
    ),
    "dev-with-node-cache": (
        "pool-main/kustomization.yaml",
        "../../../components/pool-embedded",
        "../../../components/pool-embedded, ../../../components/node-cache",
    ),
    "prod-with-node-cache": (
        "pool-main/kustomization.yaml",
        "../../../components/pool-sglang",
        "../../../components/pool-sglang, ../../../components/node-cache",
    ),
}
"""OVERLAY-with-COMPONENT, for the components that no overlay uses: file, what it says, and what it says in the variant."""
OTHERS = ("argo", "cluster-scoped", "cluster-scoped/node-cache", "gitops/argocd", "gitops/flux")
"""Folders that are applied beside an overlay."""


@pytest.fixture(scope="session")
def kubectl() -> Path:
    """The kubectl of the test cluster, out of a package; where that has none for this machine, the machine's own."""
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        return build.kubectl() / "kubectl"
    own = shutil.which("kubectl")
    assert own, "these tests need kubectl (for `kubectl kustomize`): install it"
    return Path(own)


@pytest.fixture(scope="session")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of manifests/ in which every overlay that makes its own Secret has keys for it."""
    folder = tmp_path_factory.mktemp("manifests") / "manifests"
    shutil.copytree(MANIFESTS, folder, ignore=shutil.ignore_patterns("store.env"))
    for overlay in OVERLAYS:
        if "store.env" in (folder / "overlays" / overlay / "kustomization.yaml").read_text():
            command = ["sh", str(folder / "overlays/store-env.sh"), "http://seaweedfs:8333"]
            keys = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            (folder / "overlays" / overlay / "store.env").write_text(keys)
    for name, (file, old, new) in VARIANTS.items():
        shutil.copytree(folder / "overlays" / overlay_of(name), folder / "overlays" / name)
        text = (folder / "overlays" / name / file).read_text()
        assert text.count(old) == 1
        (folder / "overlays" / name / file).write_text(text.replace(old, new))
    return folder


def overlay_of(folder: str) -> str:
    """What a variant was made of; itself for what is none."""
    return folder.partition("-with-")[0]


def kustomize(kubectl: Path, folder: Path) -> str:
    """Output of `kubectl kustomize`; the test fails with its message when it refuses."""
    done = subprocess.run([str(kubectl), "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, f"{folder}: {done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def documents(kubectl: Path, manifests: Path) -> dict[str, list[Document]]:
    """Folder of manifests/ -> its objects."""
    folders = (*(f"overlays/{name}" for name in (*OVERLAYS, *VARIANTS)), *OTHERS)
    return {folder: parse(kustomize(kubectl, manifests / folder), folder) for folder in folders}


@pytest.fixture(params=(*OVERLAYS, *VARIANTS))
def overlay(request: pytest.FixtureRequest, documents: dict[str, list[Document]]) -> list[Document]:
    """The objects of one overlay; a test that asks for it runs once for each."""
    return documents[f"overlays/{request.param}"]
