"""The cluster of these tests: the harness's (make test-cluster), or your own, named by COLCHIS_TEST_CLUSTER=yes."""

from __future__ import annotations

import os

import pytest

from tests.cluster.client import Cluster


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    if not os.environ.get("COLCHIS_TEST_CLUSTER"):
        pytest.skip("no cluster: run `make test-cluster`, or set KUBECONFIG and COLCHIS_TEST_CLUSTER=yes")
    return Cluster()
