"""The conformance table on a real controller: what the interpreter is held to is what Argo does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.client import Cluster
from tests.cluster.overlay import with_security
from tests.conformance.table import Case, check, load_cases

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1600)]

AT_ONCE = 8
CASES = load_cases()


@pytest.fixture(scope="module")
def statuses(cluster: Cluster) -> dict[str, Any]:
    """The status of each case by its name, and of each successor; None for what the API server does not take.

    A pod's life is mostly waiting, so cases run beside each other, but few enough that their deadlines hold.
    """
    successors = [name for case in CASES for name in case.expect.get("successors", {})]
    for name in successors:
        cluster.delete("workflows", name)
    workflows = {case.name: with_security(case.workflow) for case in CASES}
    ended = cluster.run_all(workflows, at_once=AT_ONCE, deadline_s=1500)
    return ended | cluster.wait(successors, deadline_s=120)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_controller_does_what_the_table_says(case: Case, statuses: dict[str, Any]) -> None:
    """Catches a row of the table, and so a rule of the interpreter, that a real controller does not follow."""
    status = statuses[case.name]
    if case.expect.get("rejected"):
        assert status is None, f"the API server took it: {status['phase']}"
        return
    assert status is not None, "the API server did not take it"
    assert check(case, status["nodes"], status["phase"], status.get("message")) == []
    assert {n: statuses[n]["phase"] for n in case.expect.get("successors", {})} == case.expect.get("successors", {})
