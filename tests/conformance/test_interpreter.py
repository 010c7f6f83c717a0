"""The conformance table on the local interpreter. Each case catches a difference from what a real controller does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from colchis.components.errors import BadConfig
from colchis.workflows.local.interpreter import Interpreter, WorkflowResult
from colchis.workflows.local.parents import ExecLauncher
from tests.conformance.table import Case, check, load_cases

CASES = load_cases()


async def _run(case: Case, work_dir: Path) -> WorkflowResult:
    launcher = ExecLauncher()
    interpreter = Interpreter(
        {},
        work_dir=work_dir,
        environment={},
        secrets={},
        launcher=launcher,
        on_event=lambda _: None,
        grace_s=1.0,
    )
    try:
        return await interpreter.run(case.workflow)
    finally:
        await launcher.close()


@pytest.mark.parametrize("case", [c for c in CASES if c.refused is None], ids=lambda case: case.name)
def test_interpreter_does_what_a_controller_does(case: Case, tmp_path: Path) -> None:
    result = asyncio.run(_run(case, tmp_path))
    chain = [*result.predecessors, result]
    assert check(case, chain[0].nodes, chain[0].phase, chain[0].message) == []
    assert {later.name: str(later.phase) for later in chain[1:]} == case.expect.get("successors", {})


@pytest.mark.parametrize("case", [c for c in CASES if c.refused is not None], ids=lambda case: case.name)
def test_interpreter_refuses_what_it_cannot_mean(case: Case, tmp_path: Path) -> None:
    with pytest.raises(BadConfig) as refusal:
        asyncio.run(_run(case, tmp_path))
    assert case.refused in str(refusal.value)
    assert not list(tmp_path.rglob("command.json")), "refused, yet something ran"


def test_table_covers_enough_with_ten_core_cases() -> None:
    assert len([case for case in CASES if case.core]) == 10
