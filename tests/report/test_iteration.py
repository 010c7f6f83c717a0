"""The page of one iteration: static, true to its summary and its boundaries."""

from __future__ import annotations

import re

from colchis.components.records.boundary import Boundary, BoundaryRecord
from colchis.components.records.iteration import Summary
from colchis.components.report.iteration import iteration_page

SUMMARY = Summary(
    run="r",
    iteration=3,
    version=4,
    kind="full",
    weights_digest="d" * 64,
    decision="trainable",
    reward_mean=0.25,
    groups={"trained": 3, "no_signal": 1, "too_few": 0},
    samples=16,
    tokens=1080,
    unscored={"timeout": 3},
    metrics={"grad_norm": 1.25, "gap_mean": 2e-7},
    seconds={"rollout": 0.5, "train": 2.0, "reload": 0.125, "pause": 0.03},
    alerts=["look & see"],
    commits={"runs/r/iterations/000003/train/commit.json": "e" * 64},
)
RECORDS = [
    BoundaryRecord(
        boundary=boundary,
        name=boundary.name.lower(),
        engine=None if boundary is Boundary.STORE else "main-0",
        run="r",
        version=4,
        ok=True,
        seconds=0.1,
        proof={"weights_digest": "d" * 64, "tensors": 26, "note": "<b>"},
    )
    for boundary in Boundary
]


def test_the_page_needs_nothing_from_elsewhere() -> None:
    """Fault: a script, an image or a link, which the viewer of the Argo UI does not load."""
    text = iteration_page(SUMMARY, RECORDS)
    assert not re.search(r"<script|<img|<link|href=|src=|url\(|@import|data:", text)
    assert text.count("<svg") == text.count("</svg>") == 1


def test_the_page_says_what_the_records_say() -> None:
    """Fault: numbers that are not the summary's, a boundary left out, text that becomes markup."""
    text = iteration_page(SUMMARY, RECORDS)
    for word in ("0.250", "1,080", "3 trained, 1 no signal", "grad_norm", "1.25", "2e-07", "look &amp; see", "2.00 s"):
        assert word in text, word
    assert "3</b><span>without a score: timeout" in text
    assert "pause" not in text.split("Seconds per stage")[1].split("Boundaries")[0], "part of reload, not beside it"
    for boundary in Boundary:
        assert f"<td>{boundary.value} {boundary.name.lower()}</td>" in text
    assert "&lt;b&gt;" in text
    assert "<td><b>" not in text
    assert "e" * 64 in text
    longest, shortest = (float(w) for w in re.findall(r'width="([0-9.]+)" height="16"', text)[1:])
    assert 15.5 < longest / shortest < 16.5, "bars are drawn to scale"


def test_an_iteration_without_training() -> None:
    """Fault: an empty batch, which has no metrics and no reward, breaks the page or shows zeros."""
    empty = SUMMARY.model_copy(update={"reward_mean": None, "metrics": {}, "decision": "empty", "reason": "no signal"})
    text = iteration_page(empty, RECORDS)
    assert "empty: no signal" in text
    assert "nothing was trained" in text
    assert ">-</b><span>mean reward" in text
