"""The cluster of these tests: the harness's (make test-cluster), or your own, named by COLCHIS_TEST_CLUSTER=yes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from colchis.components.store import Store, StoreSettings, keys
from tests.cluster.client import Cluster
from tests.cluster.runs import ITERATIONS, digests_of, ended, submit
from tests.run.conftest import make_project, model

__all__ = ["model"]

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples/arithmetic/run.yaml"
SMALL = (
    *("loop.iterations=2", "rollout.prompts=4", "rollout.group_size=4", "evaluation.prompts=8"),
    *("environment.rows=200", "environment.heldout_rows=20"),
)


FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """figure(line): something measured, printed after all tests. It is for docs/performance.md, and never asserted."""
    return lambda line: request.config.stash.setdefault(FIGURES, []).append(f"{request.node.name}: {line}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if lines := config.stash.get(FIGURES, []):
        terminalreporter.section("figures")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    if not os.environ.get("COLCHIS_TEST_CLUSTER"):
        pytest.skip("no cluster: run `make test-cluster`, or set KUBECONFIG and COLCHIS_TEST_CLUSTER=yes")
    return Cluster()


@pytest.fixture(scope="session")
def store(cluster: Cluster) -> Store:
    return Store(StoreSettings.from_environment())


@pytest.fixture(scope="session")
def engines_for(cluster: Cluster) -> Iterator[Callable[[str], list[str]]]:
    """engines_for(model) -> the pods of pool `main` of the overlay, scaled up: two, each an embedded engine with its agent.
    They are other pods for another model: an engine keeps the architecture that it first loaded."""
    serving, names = "", list[str]()
    with ExitStack() as up:

        def start(model: str) -> list[str]:
            nonlocal serving, names
            if model != serving:
                up.close()
                addresses = up.enter_context(cluster.scaled("colchis-engines-main", 2))
                for port, path in ((30000, "/health"), (9000, "/live")):
                    for address in addresses.values():
                        wait_for(f"http://{address}:{port}{path}", deadline_s=180)
                assert cluster.ready_pods(addresses, deadline_s=3) == set(), "ready without weights"
                serving, names = model, sorted(addresses)
            return names

        yield start


@pytest.fixture(scope="module")
def pool(engines_for: Callable[[str], list[str]]) -> list[str]:
    """Pool `main` for the example; the names of its pods."""
    return engines_for("example")


@pytest.fixture(scope="module")
def small_pool(engines_for: Callable[[str], list[str]]) -> list[str]:
    """Pool `main` for the tiny model of `config`; the names of its pods."""
    return engines_for("small")


def wait_for(url: str, deadline_s: float, *, token: str | None = None) -> None:
    """Until it answers well: nobody announces that a server in a container listens."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    until = time.monotonic() + deadline_s
    while True:
        try:
            httpx.get(url, timeout=5.0, headers=headers).raise_for_status()
            return
        except httpx.HTTPError as error:
            if time.monotonic() > until:
                raise TimeoutError(f"{url} does not answer after {deadline_s:g} s") from error
            time.sleep(0.5)


@pytest.fixture(scope="session")
def config(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two iterations of a tiny random model, whose weights change in both."""
    return make_project(model, tmp_path_factory.mktemp("project")).folder / "run.yaml"


@pytest.fixture(scope="session")
def calm(config: Path, cluster: Cluster, store: Store, engines_for: Callable[[str], list[str]]) -> list[str]:
    """The weights of an undisturbed run of `config`, by iteration."""
    engines_for("small")
    ended(cluster, submit(config, "calm"))
    digests = digests_of(store, "calm")
    assert len(set(digests)) == ITERATIONS, "each iteration changes the weights"
    return digests


@pytest.fixture(scope="module")
def strict(cluster: Cluster) -> Iterator[None]:
    """The controller takes runs only as references to templates, as in production."""
    with cluster.controller_setting("workflowRestrictions", {"templateReferencing": "Strict"}):
        yield


@pytest.fixture
def alone(cluster: Cluster, store: Store) -> Iterator[None]:
    """A test that fails leaves the pool to the next one."""
    yield
    for workflow in cluster.running():
        cluster.delete("workflows", workflow)
        store.delete(keys.pool_lease("main"))
