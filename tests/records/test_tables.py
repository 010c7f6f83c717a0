"""Trajectories, verdicts and rows: what a table refuses, and that what is written is what is read."""

from __future__ import annotations

import dataclasses
import io
from itertools import accumulate, pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colchis.components.errors import BadData
from colchis.components.records import trajectories, verdicts
from colchis.components.records.rows import Row, Rows, Split
from colchis.components.records.trajectories import Segment, SegmentKind, Trajectory, VersionSpan, joined
from colchis.components.records.verdicts import Reason, Verdict

TRAJECTORY = Trajectory(
    id="team/run-1/3/17/2",
    iteration=3,
    prompt_index=17,
    group=5,
    sample=2,
    token_ids=[10, 11, 12, 20, 21, 30, 22, 23],
    loss_mask=[False, False, False, True, True, False, True, True],
    logprobs=[0.0, 0.0, 0.0, -0.5, -1.25, 0.0, -0.125, 0.0],
    versions=[VersionSpan(3, 3, 5), VersionSpan(3, 6, 7), VersionSpan(4, 7, 8)],
    segments=[
        Segment(SegmentKind.MODEL, 3, 5, 0.5, "ab"),
        Segment(SegmentKind.TOOL, 5, 6, 0.25, "4"),
        Segment(SegmentKind.MODEL, 6, 8, 0.5, "cd"),
    ],
    prompt_tokens=3,
    finish_reason="stop",
    seed=99,
    engine="e0",
    sampling_digest="0" * 64,
    started_at="2026-01-01T00:00:00.000+00:00",
    seconds=1.5,
    cached_tokens=2,
)
VERDICT = Verdict(
    trajectory_id=TRAJECTORY.id, score=0.5, grader="exact", grader_version="1", grader_digest="1" * 64, seconds=0.1
)


def _rewrite(data: bytes, change) -> bytes:
    table = change(pq.read_table(io.BytesIO(data)))
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def test_trajectory_round_trip_keeps_every_field():
    fork = dataclasses.replace(TRAJECTORY, id="team/run-1/3/17/2~1", parent=TRAJECTORY.id)
    assert trajectories.from_parquet(trajectories.to_parquet([TRAJECTORY, fork])) == [TRAJECTORY, fork]
    assert (TRAJECTORY.run, TRAJECTORY.completion, TRAJECTORY.oldest_version) == ("team/run-1", "cd", 3)
    assert trajectories.from_parquet(trajectories.to_parquet([])) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": [True] * 3}, "loss_mask has 3 entries for 8"),
        ({"logprobs": [0.0]}, "logprobs has 1 entries"),
        ({"id": "run-1/3/17/1"}, "id must be RUN/3/17/2"),
        ({"id": "/3/17/2"}, "id must be"),
        ({"prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"loss_mask": [False, True, False, True, True, False, True, True]}, "trains prompt token 1"),
        ({"loss_mask": [False, False, False, True, True, True, True, True]}, "written by 'tool'"),
        ({"logprobs": [0, 0, 0, float("nan"), -1, 0, -1, -1]}, r"logprobs\[3\] is nan"),
        ({"logprobs": [0, 0, 0, -1, float("-inf"), 0, -1, -1]}, r"logprobs\[4\] is -inf"),
        ({"logprobs": [0, 0, 0, 0.5, -1, 0, -1, -1]}, "no log-probability"),
        ({"versions": [VersionSpan(3, 3, 5), VersionSpan(3, 6, 7)]}, "token 7 is trained but no version"),
        ({"versions": [VersionSpan(3, 3, 7), VersionSpan(4, 6, 8)]}, r"versions\[1\]"),
        ({"versions": [VersionSpan(3, 3, 9)]}, r"versions\[0\]"),
        ({"versions": [VersionSpan(-1, 3, 8)]}, "version is -1"),
        ({"segments": TRAJECTORY.segments[:2]}, "segments end at token 6 of 8"),
        ({"segments": TRAJECTORY.segments[1:]}, "expected to start at 3"),
        ({"token_ids": [10, 11, 12, 20, -1, 30, 22, 23]}, "token id -1"),
        ({"seed": -1}, "seed is -1"),
        ({"seconds": float("inf")}, "seconds is inf"),
    ],
)
def test_trajectory_that_contradicts_itself_is_refused(change, message):
    """A mask, span or log-probability that is off by one would train the wrong tokens without a sound."""
    with pytest.raises(BadData, match=message):
        dataclasses.replace(TRAJECTORY, **change)


def test_table_of_trajectories_refuses_duplicates_and_mixed_iterations():
    with pytest.raises(BadData, match="occurs twice"):
        trajectories.to_parquet([TRAJECTORY, TRAJECTORY])
    other = dataclasses.replace(TRAJECTORY, id="team/run-1/4/17/2", iteration=4)
    with pytest.raises(BadData, match="different iterations"):
        trajectories.to_parquet([TRAJECTORY, other])


def test_corrupt_or_foreign_bytes_are_refused_by_name():
    data = trajectories.to_parquet([TRAJECTORY])
    with pytest.raises(BadData, match=r"not a readable Parquet file.*part-0"):
        trajectories.from_parquet(data[: len(data) // 2], source="part-0")
    with pytest.raises(BadData, match="not a readable"):
        trajectories.from_parquet(b"")
    with pytest.raises(BadData, match=r"expected a table of format 'trajectories/1', found 'verdicts/1'"):
        trajectories.from_parquet(verdicts.to_parquet([VERDICT]))
    flipped = bytearray(data)
    flipped[60] ^= 0xFF
    with pytest.raises(BadData):
        trajectories.from_parquet(bytes(flipped))


def test_wrong_columns_are_named():
    data = trajectories.to_parquet([TRAJECTORY])
    with pytest.raises(BadData, match="column 'seed' is missing"):
        trajectories.from_parquet(_rewrite(data, lambda t: t.drop_columns(["seed"])))
    with pytest.raises(BadData, match="column 'extra' is not part"):
        trajectories.from_parquet(_rewrite(data, lambda t: t.append_column("extra", pa.array([1]))))
    with pytest.raises(BadData, match="column 'seed': expected int64, found int32"):
        trajectories.from_parquet(_rewrite(data, lambda t: _with(t, "seed", pa.array([1], pa.int32()))))
    with pytest.raises(BadData, match="column 'engine', row 0: is null"):
        trajectories.from_parquet(_rewrite(data, lambda t: _with(t, "engine", pa.array([None], pa.string()))))
    with pytest.raises(BadData, match=r"trajectory 'team/run-1/3/17/2': prompt_tokens is 9.*part, row 0"):
        trajectories.from_parquet(
            _rewrite(data, lambda t: _with(t, "prompt_tokens", pa.array([9], pa.int32()))), source="part"
        )


def _with(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, column)


def test_verdict_round_trip_and_exactly_one_of_score_and_reason():
    timeout = dataclasses.replace(VERDICT, trajectory_id="r/0/0/0", score=None, reason=Reason.TIMEOUT, detail="5 s")
    assert verdicts.from_parquet(verdicts.to_parquet([VERDICT, timeout])) == [VERDICT, timeout]
    for change in ({"score": None}, {"reason": Reason.TIMEOUT}, {"score": float("nan")}, {"seconds": float("inf")}):
        with pytest.raises(BadData, match="verdict of 'team/run-1/3/17/2'"):
            dataclasses.replace(VERDICT, **change)
    with pytest.raises(BadData, match="two verdicts"):
        verdicts.to_parquet([VERDICT, VERDICT])


def test_verdict_with_unknown_reason_is_refused_on_reading():
    data = verdicts.to_parquet([dataclasses.replace(VERDICT, score=None, reason=Reason.TIMEOUT)])
    with pytest.raises(BadData, match=r"'shrug' is not a valid Reason.*row 0"):
        verdicts.from_parquet(_rewrite(data, lambda t: _with(t, "reason", pa.array(["shrug"]))))


def test_rows_round_trip():
    """Fault: a row that comes back as another one, or metadata that is lost."""
    first, second = Row(0, "1+1=", "2", metadata={"b": [1], "a": "ü"}), Row(1, "2+2=", "4", Split.HELDOUT)
    rows = Rows([first, second])
    again = Rows.from_parquet(rows.to_parquet())
    assert list(again) == [first, second]
    assert again == rows
    assert again.indices(Split.HELDOUT) == [1]
    assert Rows([first, dataclasses.replace(second, answer="5")]) != rows


def test_rows_of_a_file_are_checked_like_new_ones():
    """Fault: a table written by something else, which positions or splits of another run are read from."""
    data = Rows([Row(0, "a", "1"), Row(1, "b", "1", Split.HELDOUT)]).to_parquet()
    with pytest.raises(BadData, match=r"row 1: index is 5 \[here\]"):
        Rows.from_parquet(_rewrite(data, lambda t: _with(t, "index", pa.array([0, 5]))), source="here")
    with pytest.raises(BadData, match="'test' is none of train, heldout"):
        Rows.from_parquet(_rewrite(data, lambda t: _with(t, "split", pa.array(["train", "test"]))))
    damaged = Rows.from_parquet(_rewrite(data, lambda t: _with(t, "metadata", pa.array(["{}", "{"]))))
    with pytest.raises(BadData, match="row 1: metadata is not JSON"):
        damaged[1]


def test_rows_refuse_duplicate_prompts_and_an_empty_split():
    """A prompt in both splits would make the evaluation measure memory."""
    with pytest.raises(BadData, match="occurs twice"):
        Rows((Row(0, "a", "1"), Row(1, "a", "1", Split.HELDOUT)))
    with pytest.raises(BadData, match="split 'heldout'"):
        Rows((Row(0, "a", "1"),))
    with pytest.raises(BadData, match="index is 7"):
        Rows((Row(7, "a", "1"),))
    with pytest.raises(BadData, match="row 0: the prompt is empty"):
        Rows((Row(0, "", "1"),))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=8))
def test_joined_spans_say_the_same_of_every_token_in_as_few_as_can_be(pieces: list[tuple[int, int]]) -> None:
    """Catches a span without tokens, which an engine reports when an update comes between two of them, and a seam that hides
    that two spans are of one version."""
    ends = list(accumulate(length for _, length in pieces))
    spans = [VersionSpan(version, end - length, end) for (version, length), end in zip(pieces, ends, strict=True)]
    found = joined(spans)
    by_token = [version for version, length in pieces for _ in range(length)]
    assert [span.version for span in found for _ in range(span.start, span.end)] == by_token
    assert all(span.start < span.end for span in found)
    assert all(a.end == b.start and a.version != b.version for a, b in pairwise(found))
