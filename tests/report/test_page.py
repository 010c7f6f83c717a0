"""The report: readable where scripts and images are forbidden, and true to the summaries."""

from __future__ import annotations

import re

import pytest

from colchis.components.config import parse
from colchis.components.records.iteration import Evaluation, Summary
from colchis.components.records.run import RunRecord, Serving
from colchis.components.report.chart import Series, line_chart
from colchis.components.report.page import page
from colchis.components.report.status import Status

CONFIG = parse({"model": {"source": f"input:{'a' * 64}"}, "environment": {"kind": "reasoning_gym", "task": "gcd"}})


def summary(iteration: int, reward: float | None) -> Summary:
    return Summary(
        run="r",
        iteration=iteration,
        version=iteration + 1,
        kind="full" if reward is not None else "same",
        weights_digest="d" * 64,
        decision="trainable" if reward is not None else "empty",
        reason=None if reward is not None else "no <signal>",
        reward_mean=reward,
        groups={"trained": 3, "no_signal": 1},
        samples=16,
        tokens=80,
        metrics={"grad_norm": 10.0**iteration, "gap_mean": 2e-7} if reward is not None else {},
        seconds={"rollout": 0.5, "train": 0.25, "reload": 0.125},
        alerts=["look & see"] if iteration == 2 else [],
    )


@pytest.fixture
def status() -> Status:
    record = RunRecord(
        run="r",
        config=CONFIG,
        config_digest=CONFIG.digest(),
        identity_digest=CONFIG.identity_digest(),
        template="t",
        code_version="0",
        rows="b" * 64,
        model="a" * 64,
    )
    evaluation = {"run": "r", "prompts": 100, "unscored": 0}
    return Status(
        record=record,
        serving=Serving(run="r", version=3, weights_digest="d" * 64, engines=["main-0"]),
        summaries=[summary(0, 0.25), summary(1, None), summary(2, 0.75)],
        evaluations=[
            Evaluation(**evaluation, version=0, correct=20, accuracy=0.2, low=0.13, high=0.29),
            Evaluation(**evaluation, version=3, correct=80, accuracy=0.8, low=0.71, high=0.87),
        ],
        stop=None,
    )


def test_page_needs_nothing_that_the_artifact_viewer_forbids(status: Status) -> None:
    """Fault: a page that is blank in the Argo UI, whose policy allows inline CSS and SVG and nothing else."""
    html = page(status)
    assert not re.search(r"<script|<img|<link|url\(|data:|@import|https?://", html)
    assert "<svg" in html


def test_page_shows_the_numbers_of_the_records(status: Status) -> None:
    """Fault: a report that flatters."""
    html = page(status)
    for text in ("3 / 10", "v3", "20.0 %", "80.0 %", "[71.0, 87.0]", "240", "0.750", "look &amp; see"):
        assert text in html


def test_what_has_no_score_is_shown(status: Status) -> None:
    """Fault: a grader that crashes, seen only as a policy that is wrong."""
    status.summaries[1] = status.summaries[1].model_copy(update={"unscored": {"timeout": 3, "grader_error": 2}})
    status.evaluations[1] = status.evaluations[1].model_copy(update={"unscored": 7})
    html = page(status)
    assert "5</b><span>trajectories without a score" in html
    assert "7 of 100 without a score" in html


@pytest.mark.parametrize("groups", [{}, {"trained": 0, "no_signal": 0}])
def test_an_iteration_without_groups_has_a_page(status: Status, groups: dict[str, int]) -> None:
    """Fault: a skipped iteration, which no group belongs to, that ends every later Workflow of the run in `close`."""
    status.summaries[1] = status.summaries[1].model_copy(update={"groups": groups, "samples": 0, "tokens": 0})
    assert "<svg" in page(status)


def test_text_from_records_is_escaped(status: Status) -> None:
    """Fault: a reason or a name that becomes markup."""
    assert "no &lt;signal&gt;" in page(status)
    assert "no <signal>" not in page(status)


def test_gaps_stay_gaps_in_a_chart() -> None:
    """Fault: a line drawn across an iteration that measured nothing."""
    chart = line_chart("x", [Series("a", [(0, 1.0), (1, 2.0), (2, None), (3, 1.0), (4, float("nan")), (5, 3.0)])])
    path = re.search(r'<path d="([^"]*)"', chart)
    assert path is not None
    assert path.group(1).count("M") == 3


@pytest.mark.parametrize("values", [[], [None], [float("nan")], [0.0]])
def test_chart_of_nothing_says_so(values: list[float | None]) -> None:
    """Fault: a division by zero in the report of a run that has just begun."""
    chart = line_chart("empty", [Series("a", list(enumerate(values)))], log=True)
    assert "nothing measured yet" in chart
