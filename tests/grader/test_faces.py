"""What each face gives for an answer, and that what cannot be scored is a reason and never a zero."""

from __future__ import annotations

import pytest

from colchis.components.config import parse
from colchis.components.environments import generate_rows
from colchis.components.errors import BadData
from colchis.components.grader import Grader, grade
from colchis.components.grader.grading import grader_digest
from colchis.components.records.rows import Row, Rows, Split
from colchis.components.records.trajectories import Segment, SegmentKind, Trajectory, VersionSpan
from colchis.components.records.verdicts import Reason


def config(environment=None, **grader):
    return parse(
        {
            "model": {"source": "file:x"},
            "environment": environment or {"kind": "own", "name": "x"},
            "grader": {"timeout_s": 5.0} | grader,
        }
    )


def said(text, *, row=0, sample=0, finish_reason="stop"):
    """A trajectory whose only model turn says `text`."""
    return Trajectory(
        id=f"r/0/{row}/{sample}",
        iteration=0,
        prompt_index=row,
        group=0,
        sample=sample,
        token_ids=[2, 3, 4],
        loss_mask=[False, True, True],
        logprobs=[0.0, -1.0, -1.0],
        versions=[VersionSpan(0, 1, 3)],
        segments=[Segment(SegmentKind.MODEL, 1, 3, 0.0, text)],
        prompt_tokens=1,
        finish_reason=finish_reason,
        seed=0,
        engine="e",
        sampling_digest="",
        started_at="",
        seconds=0.0,
        cached_tokens=0,
    )


def rows(*answers):
    table = [Row(i, f"p{i}", answer) for i, answer in enumerate(answers)]
    return Rows((*table, Row(len(table), "held", "x", Split.HELDOUT)))


def scores(config_, texts, answer):
    verdicts = grade(config_, [said(t, sample=i) for i, t in enumerate(texts)], rows(answer))
    return [v.score if v.reason is None else v.reason for v in verdicts]


def test_exact_is_equality_after_stripping():
    texts = ["42", " 42\n", "42.", "The answer is 42", "", "042"]
    assert scores(config(), texts, " 42 ") == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_rule_finds_the_answer_as_text():
    texts = ["so <42>", "<4> no, <42>", "42", "<42 >", "<>"]
    assert scores(config(face="rule", pattern=r"<([^>]*)>"), texts, "42") == [1.0, 0.0, 0.0, 1.0, 0.0]


def test_rule_compares_numbers_within_a_tolerance():
    rule = config(face="rule", tolerance=0.01)
    texts = ["3.14", "3.141", "3.16", "+314e-2", "nan", "inf", "1_0", "abc", "", "1e999999999", "٣", "3."]
    assert scores(rule, texts, "3.14") == [1.0, 1.0, 0.0, 1.0] + [0.0] * 8
    exact = config(face="rule", tolerance=0.0)
    assert scores(exact, ["9007199254740993", "9007199254740992"], "9007199254740993") == [1.0, 0.0]


def test_an_answer_that_cannot_be_compared_is_malformed():
    """The row's fault, not the policy's."""
    assert scores(config(face="rule", tolerance=0.1), ["3"], "three") == [Reason.MALFORMED]
    assert scores(config(), ["3"], "  ") == [Reason.MALFORMED]
    assert scores(config(face="rule", pattern="3"), ["3"], "") == [Reason.MALFORMED]


def test_environment_face_asks_the_library_for_its_own_score():
    environment = {"kind": "reasoning_gym", "task": "chain_sum", "rows": 20, "heldout_rows": 2}
    c = config(environment, face="environment")
    table = generate_rows(c.environment)
    right, wrong = said(table[0].answer, row=0), said("x", row=1)
    verdicts = grade(c, [right, wrong], table)
    assert verdicts[0].score == 1.0
    assert verdicts[1].score < 0.5
    assert verdicts[0].grader == "environment"


@pytest.mark.parametrize("finish_reason", ["environment_error", "environment_timeout"])
def test_an_episode_that_the_environment_broke_off_has_no_score(finish_reason):
    """Scored, it would teach the policy that what it said was wrong."""
    (verdict,) = grade(config(), [said("42", finish_reason=finish_reason)], rows("42"))
    assert verdict.reason is Reason.SANDBOX_ERROR


@pytest.mark.parametrize("finish_reason", ["length", "turns", "context"])
def test_an_episode_that_the_policy_used_up_is_scored(finish_reason):
    (verdict,) = grade(config(), [said("42", finish_reason=finish_reason)], rows("42"))
    assert verdict.score == 1.0


def test_a_trajectory_without_a_model_turn_is_a_model_error():
    silent = Trajectory(
        **{name: getattr(said(""), name) for name in Trajectory.__dataclass_fields__}
        | {"token_ids": [2], "loss_mask": [False], "logprobs": [0.0], "versions": [], "segments": []}
    )
    (verdict,) = grade(config(), [silent], rows("42"))
    assert verdict.reason is Reason.MODEL_ERROR


def test_verdicts_keep_the_order_and_name_trajectory_and_grader():
    trajectories = [said("1", row=1), said("0", row=0), said("1", row=0, sample=1)]
    for c in (config(), config(face="rule", pattern=".*", workers=2)):
        verdicts = grade(c, trajectories, rows("0", "1"))
        assert [v.trajectory_id for v in verdicts] == [t.id for t in trajectories]
        assert [v.score for v in verdicts] == [1.0, 1.0, 0.0]
        assert {v.grader for v in verdicts} == {c.grader.face}
        assert {v.grader_digest for v in verdicts} == {grader_digest(c)}
        assert all(v.seconds >= 0 for v in verdicts)


def test_a_row_that_is_not_there_is_refused():
    with pytest.raises(BadData, match="names row 7 of 2"):
        grade(config(), [said("1", row=7)], rows("1"))


def test_nothing_to_grade():
    with Grader(config(face="rule", pattern="x")) as grader:
        assert grader.grade([], rows("1")) == []


def test_digest_covers_what_a_score_depends_on():
    """Two gradings with one digest must be comparable; where they ran must not matter."""
    base = config(face="rule", pattern="a")
    assert grader_digest(base) == grader_digest(config(face="rule", pattern="a", workers=4))
    assert grader_digest(base) == grader_digest(config(face="rule", pattern="a", placement="step", shards=2))
    assert grader_digest(base) != grader_digest(config(face="rule", pattern="b"))
    assert grader_digest(base) != grader_digest(config(face="rule", pattern="a", tolerance=0.5))
    one, two = (config({"kind": "own", "name": n}, face="environment") for n in ("x", "y"))
    assert grader_digest(one) != grader_digest(two)
