"""`colchis diff`: two runs of one store."""

from __future__ import annotations

from typing import Any

from colchis.components.config import parse
from colchis.components.records.iteration import Evaluation, Summary
from colchis.components.records.run import RunRecord, Serving
from colchis.components.report import Status
from colchis.workflows.compare import differences


def finished(run: str, *, accuracy: float, code_version: str = "1", **sections: Any) -> Status:
    config = parse(
        {
            "model": {"source": f"input:{'a' * 64}"},
            "environment": {"kind": "reasoning_gym", "task": "gcd"},
            **sections,
        }
    )
    record = RunRecord(
        run=run,
        config=config,
        config_digest=config.digest(),
        identity_digest=config.identity_digest(),
        template="colchis-sync-cpu",
        template_digest="d",
        code_version=code_version,
        rows="b" * 64,
        model="a" * 64,
    )
    summaries = [
        Summary(run=run, iteration=i, version=i + 1, kind="full", weights_digest="c" * 64, decision=decision, samples=8)
        for i, decision in enumerate(("trainable", "empty"))
    ]
    fields = {"prompts": 10, "unscored": 0, "correct": 1, "low": 0.0, "high": 1.0, "run": run}
    evaluations = [Evaluation(version=v, accuracy=a, **fields) for v, a in ((2, accuracy), (0, 0.1))]
    serving = Serving(run=run, version=2, weights_digest="c" * 64, engines=["e"])
    return Status(record=record, serving=serving, summaries=summaries, evaluations=evaluations, stop=None)


def test_what_differs_is_named_and_the_outcome_is_always_there() -> None:
    """Fault: a difference in the code, or in a nested field, that the comparison does not show."""
    a = finished("a", accuracy=0.5)
    b = finished("b", accuracy=0.7, code_version="2", trainer={"learning_rate": 0.25})
    found = {d.field: (d.kind, d.a, d.b) for d in differences(a, b)}
    assert found["trainer.learning_rate"] == ("config", a.record.config.trainer.learning_rate, 0.25)
    assert found["code_version"] == ("code", "1", "2")
    assert found["accuracy"] == ("outcome", 0.5, 0.7)
    assert found["accuracy_version"] == ("outcome", 2, 2)
    assert found["iterations_not_trained"] == ("outcome", 1, 1)
    assert found["samples"] == ("outcome", 16, 16)
    assert {d.kind for d in differences(a, a)} == {"outcome"}
