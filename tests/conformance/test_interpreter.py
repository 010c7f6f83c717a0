"""The conformance table on the local interpreter. Each case catches a difference from what a real controller does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from colchis.components.errors import BadConfig
from colchis.workflows.local.interpreter import Interpreter, WorkflowResult
from colchis.workflows.local.launcher import Launcher
from colchis.workflows.local.parents import ExecLauncher
from colchis.workflows.templates import RETRY
from tests.conformance.table import Case, check, load_cases

CASES = load_cases()
AT_ONCE = 4


async def _run(case: Case, work_dir: Path, launcher: Launcher) -> WorkflowResult:
    interpreter = Interpreter(
        {},
        work_dir=work_dir,
        environment={},
        secrets={},
        launcher=launcher,
        on_event=lambda _: None,
        grace_s=15.0,
    )
    return await interpreter.run(case.workflow)


async def _run_all(work_dir: Path) -> dict[str, WorkflowResult | BaseException]:
    launcher = ExecLauncher()
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(case: Case) -> WorkflowResult:
        async with slots:
            return await _run(case, work_dir / case.name, launcher)

    try:
        results = await asyncio.gather(*map(one, CASES), return_exceptions=True)
    finally:
        await launcher.close()
    return dict(zip([case.name for case in CASES], results, strict=True))


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conformance")


@pytest.fixture(scope="module")
def results(work_dir: Path) -> dict[str, WorkflowResult | BaseException]:
    return asyncio.run(_run_all(work_dir))


@pytest.mark.parametrize("case", [c for c in CASES if c.refused is None], ids=lambda case: case.name)
def test_interpreter_does_what_a_controller_does(
    case: Case, results: dict[str, WorkflowResult | BaseException]
) -> None:
    result = results[case.name]
    if isinstance(result, BaseException):
        raise result
    first, *later = [*result.predecessors, result]
    assert check(case, first.nodes, first.phase, first.message) == []
    assert {one.name: str(one.phase) for one in later} == case.expect.get("successors", {})


@pytest.mark.parametrize("case", [c for c in CASES if c.refused is not None], ids=lambda case: case.name)
def test_interpreter_refuses_what_it_cannot_mean(
    case: Case, results: dict[str, WorkflowResult | BaseException], work_dir: Path
) -> None:
    refusal = results[case.name]
    assert isinstance(refusal, BadConfig)
    assert case.refused is not None
    assert case.refused in str(refusal)
    assert not list((work_dir / case.name).rglob("command.json")), "refused, yet something ran"


def test_the_interpreter_ends_at_once_what_waits_in_an_abandoned_set(
    results: dict[str, WorkflowResult | BaseException],
) -> None:
    """Catches a last container that waits for the one before it. A controller may be late; the interpreter is not."""
    result = results["retry-container-set-abandoned"]
    assert isinstance(result, WorkflowResult)
    by_name = {node["name"].removeprefix(result.name): node for node in result.nodes.values()}
    assert by_name["(0)"]["outputs"]["exitCode"] == "143"
    assert by_name["(0).main"]["finishedAt"] < by_name["(0).b-lasts"]["finishedAt"]


def test_table_has_ten_core_cases() -> None:
    assert len([case for case in CASES if case.core]) == 10


def test_the_retry_expression_of_the_table_is_that_of_the_stages() -> None:
    """Catches a table that pins yesterday's expression."""
    (case,) = [case for case in CASES if case.name == "retry-container-set-abandoned"]
    (template,) = case.workflow["spec"]["templates"]
    assert template["retryStrategy"]["expression"] == RETRY.expression
