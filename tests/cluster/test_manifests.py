"""manifests/ on a real API server: every overlay is admitted, and accounts may do what docs/security.md says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cluster.client import Cluster
from tests.manifests.conftest import MANIFESTS, OVERLAYS
from tests.manifests.test_rights import documented

pytestmark = pytest.mark.cluster

ACCOUNTS = ("colchis-workflow", "colchis-engine", "colchis-executor", "colchis-submitter")
EVERYBODY = re.compile(r"selfsubject|^/|^\[")
"""What any account may: ask about itself, and read the API's own description."""


def kubectl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["kubectl", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("name", ["cluster-scoped", *(f"overlays/{o}" for o in OVERLAYS)])
def test_the_api_server_admits_every_object(cluster: Cluster, tmp_path: Path, name: str) -> None:
    """Catches what no schema says, and pods that `restricted` would refuse: the namespace warns of them."""
    folder = tmp_path / "manifests"
    shutil.copytree(MANIFESTS, folder)
    keys = subprocess.run(
        ["sh", str(folder / "overlays/store-env.sh"), "http://seaweedfs:8333"],
        capture_output=True,
        text=True,
        check=True,
    )
    if name.startswith("overlays/"):
        (folder / name / "store.env").write_text(keys.stdout)
    done = kubectl(
        *("apply", "--server-side", "--dry-run=server", "--force-conflicts", "--field-manager=test"),
        *("-k", str(folder / name)),
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    assert done.stdout.count("serverside-applied (server dry run)") >= (1 if name == "cluster-scoped" else 25)


def test_a_pod_that_is_not_restricted_is_warned_of(cluster: Cluster, tmp_path: Path) -> None:
    """Catches a dry run that cannot fail."""
    folder = tmp_path / "manifests"
    shutil.copytree(MANIFESTS, folder)
    engines = folder / "components/pool-embedded/engines.yaml"
    engines.write_text(engines.read_text().replace("allowPrivilegeEscalation: false", "privileged: true"))
    (folder / "overlays/dev/store.env").write_text("endpoint=x\n")
    done = kubectl("apply", "--server-side", "--dry-run=server", "-k", str(folder / "overlays/dev"))
    assert "would violate PodSecurity" in done.stderr


def rights(account: str) -> set[tuple[str, str]]:
    """(resource, verb) that the API server grants an account, beyond what everybody has."""
    who = f"system:serviceaccount:colchis:{account}"
    done = kubectl("auth", "can-i", "--list", "-n", "colchis", "--as", who, "--no-headers")
    assert done.returncode == 0, done.stderr
    found = set()
    for line in done.stdout.splitlines():
        resource, verbs = line.split()[0], re.findall(r"\[([^\]]*)\]", line)[-1].split()
        if not EVERYBODY.search(resource):
            found |= {(resource, verb) for verb in verbs}
    return found


@pytest.mark.parametrize("account", ACCOUNTS)
def test_accounts_may_do_what_the_table_says(cluster: Cluster, account: str) -> None:
    """Catches a right that a binding, an aggregated role or a group gives beside ours."""
    assert rights(account) == documented()[account]
