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
WITH_MINIO = "dev-with-minio"
"""The overlay `dev` with the component that no overlay uses."""
WITH_DIRECT = "dev-with-direct-transfer"
"""The same for the other one that none uses."""
OTHERS = ("argo", "cluster-scoped", "gitops/argocd", "gitops/flux")
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
    shutil.copytree(folder / "overlays/dev", folder / "overlays" / WITH_MINIO)
    kustomization = folder / "overlays" / WITH_MINIO / "kustomization.yaml"
    kustomization.write_text(kustomization.read_text().replace("components/seaweedfs", "components/minio"))
    shutil.copytree(folder / "overlays/dev", folder / "overlays" / WITH_DIRECT)
    kustomization = folder / "overlays" / WITH_DIRECT / "kustomization.yaml"
    seaweedfs = "components: [../../components/seaweedfs"
    assert seaweedfs in kustomization.read_text()
    text = kustomization.read_text().replace(seaweedfs, f"{seaweedfs}, ../../components/direct-transfer")
    kustomization.write_text(text)
    return folder


def kustomize(kubectl: Path, folder: Path) -> str:
    """Output of `kubectl kustomize`; the test fails with its message when it refuses."""
    done = subprocess.run([str(kubectl), "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, f"{folder}: {done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def documents(kubectl: Path, manifests: Path) -> dict[str, list[Document]]:
    """Folder of manifests/ -> its objects."""
    folders = (*(f"overlays/{name}" for name in (*OVERLAYS, WITH_MINIO, WITH_DIRECT)), *OTHERS)
    return {folder: parse(kustomize(kubectl, manifests / folder), folder) for folder in folders}


@pytest.fixture(params=(*OVERLAYS, WITH_MINIO, WITH_DIRECT))
def overlay(request: pytest.FixtureRequest, documents: dict[str, list[Document]]) -> list[Document]:
    """The objects of one overlay; a test that asks for it runs once for each."""
    return documents[f"overlays/{request.param}"]
