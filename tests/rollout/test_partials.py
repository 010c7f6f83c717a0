"""Aborted answers: dropped, or kept and continued, and never taken for finished ones."""

from __future__ import annotations

import pytest

from colchis.components.errors import PeerUnavailable
from colchis.components.records.trajectories import VersionSpan
from colchis.components.rollout import Engines, Wanted
from colchis.components.rollout.client import Completion, Piece
from colchis.components.rollout.partials import Partial
from tests.rollout.fault_server import FIRST, FaultServer


def piece(ids: list[int], *versions: tuple[int, int, int]) -> Piece:
    spans = tuple(VersionSpan(*v) for v in versions or [(3, 0, len(ids))])
    return Piece(token_ids=tuple(ids), logprobs=(-0.5,) * len(ids), versions=spans, cached_tokens=2)


def last(ids: list[int], *versions: tuple[int, int, int]) -> Completion:
    p = piece(ids, *versions)
    return Completion(
        token_ids=p.token_ids,
        logprobs=p.logprobs,
        versions=p.versions,
        cached_tokens=9,
        finish_reason="length",
        stop_text=None,
    )


def test_what_was_drawn_is_kept_and_the_rest_asked_for(generate):
    """Fault: tokens drawn twice, or drawn again with the numbers that drew the first ones."""
    with FaultServer(script=("abort halfway",)) as server:
        arrived, stats = generate(Engines.at([server.url]), groups=1, partials="resume")
    first, second = server.requests
    (again,) = second["input_ids"]
    assert again == [*first["input_ids"][0], FIRST]
    assert second["sampling_params"][0]["max_new_tokens"] == first["sampling_params"][0]["max_new_tokens"] - 1
    assert second["sampling_params"][0]["sampling_seed"] != first["sampling_params"][0]["sampling_seed"]
    sample = arrived[0][0]
    start = sample.prompt_tokens
    assert sample.token_ids[start] == FIRST
    assert sample.logprobs[start : start + 2] == [-0.25, -0.5]
    assert sample.versions == [VersionSpan(3, start, len(sample.token_ids))]
    assert all(sample.loss_mask[start:])
    assert len(sample.segments) == 1, "one turn, however many requests it took"
    assert (stats.turns, stats.resumed_tokens, stats.faults) == (4, 1, {"aborted": 1})


def test_an_engine_that_aborts_again_and_again_makes_progress(generate):
    """Fault: a long answer given up after ten aborts, each of which brought it further."""
    with FaultServer(always="abort halfway") as server:
        arrived, stats = generate(Engines.at([server.url]), groups=1, partials="resume", max_new_tokens=14)
    sample = arrived[0][0]
    assert sample.token_ids[sample.prompt_tokens :] == [FIRST] * 14
    assert sample.finish_reason == "length"
    assert stats.faults["aborted"] >= 14


def test_without_resumption_nothing_is_kept(generate):
    with FaultServer(always="abort halfway") as server, pytest.raises(PeerUnavailable, match=r"10 requests.*aborted"):
        generate(Engines.at([server.url]), groups=1)
    assert len({tuple(map(tuple, r["input_ids"])) for r in server.requests[-3:]}) == 1


@pytest.mark.parametrize("fault", ["abort of another version", "abort with nan"])
def test_tokens_of_an_abort_pass_the_same_checks(generate, fault):
    """Fault: a partial answer of another policy, or with no probabilities, is continued as if it were good."""
    with FaultServer(script=(fault,)) as server:
        arrived, stats = generate(Engines.at([server.url]), groups=1, partials="resume")
    assert stats.resumed_tokens == 0
    assert server.requests[1]["input_ids"] == server.requests[0]["input_ids"][:1]
    assert [v.version for t in arrived[0] for v in t.versions] == [3] * 4


def test_the_rest_may_come_from_another_engine_and_a_newer_version(generate):
    """Fault: a span that claims tokens of the version before for the one after, or an engine that no record names."""
    with FaultServer(version=3, script=("abort halfway",)) as old, FaultServer(version=4) as new:

        class Both(Engines):
            """The engine of version 3 first: the others come when it has aborted."""

            async def statuses(self, client):
                found = await super().statuses(client)
                return [s for s in found if (s.engine.url == old.url) != bool(old.requests)]

        arrived, _ = generate(Both(urls=[old.url, new.url]), groups=1, partials="resume", wanted=Wanted.at_least(3))
    sample = arrived[0][0]
    start, end = sample.prompt_tokens, len(sample.token_ids)
    assert sample.versions == [VersionSpan(3, start, start + 1), VersionSpan(4, start + 1, end)]
    assert sample.engine == f"{old.url},{new.url}"
    assert sample.oldest_version == 3


@pytest.mark.parametrize(
    ("wanted", "label", "version"),
    [
        (Wanted.exactly(3), "3", 3),
        (Wanted.exactly(3), "4", None),
        (Wanted.at_least(3), "4", 4),
        (Wanted.at_least(3), "2", None),
        (Wanted.at_least(3), "unproven-4", None),
        (Wanted.at_least(3), "default", None),
        (Wanted.at_least(3), "٤", None),
        (Wanted.at_least(0), "-1", None),
    ],
)
def test_labels(wanted: Wanted, label: str, version: int | None) -> None:
    assert wanted.read(label) == version


def test_pieces_join(tokenizer):
    partial = Partial()
    partial.keep(piece([5, 6], (3, 0, 1), (4, 1, 2)))
    partial.keep(piece([7], (4, 0, 1)))
    whole = partial.finish(last([8, 9], (4, 0, 1), (5, 1, 2)), [], tokenizer)
    assert whole.token_ids == (5, 6, 7, 8, 9)
    assert whole.versions == (VersionSpan(3, 0, 1), VersionSpan(4, 1, 4), VersionSpan(5, 4, 5))
    assert whole.cached_tokens == 2, "of the prompt, not of what was drawn before"


def test_a_stop_text_across_the_border_ends_the_turn(tokenizer):
    """Fault: a turn that goes on past its stop text, half of which each engine drew."""
    ids = tokenizer.encode_message("x=7;"[:3])
    partial = Partial()
    partial.keep(piece(ids[:2]))
    whole = partial.finish(last([ids[2], *ids, *ids], (4, 0, 7)), ["=7"], tokenizer)
    assert tokenizer.decode(whole.token_ids) == "x=7"
    assert (whole.finish_reason, whole.stop_text) == ("stop", "=7")
    assert whole.versions == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))
    assert len(whole.logprobs) == 3


@pytest.mark.parametrize("lengths", [(1, 1, 2), (2, 1, 1), (1, 2, 1)])
def test_a_stop_text_may_end_at_any_border(tokenizer, lengths):
    """Fault: one that the second of three requests completed, or the very last token."""
    ids = tokenizer.encode_message("x=7:")
    pieces, start = [], 0
    for length in lengths:
        pieces.append(ids[start : start + length])
        start += length
    partial = Partial()
    for kept in pieces[:-1]:
        partial.keep(piece(kept))
    for stop, text in ((["=7"], "x=7"), (["7:"], "x=7:"), (["x="], "x=")):
        whole = partial.finish(last(pieces[-1]), stop, tokenizer)
        if len(pieces[0]) >= len(text):
            continue  # the first engine would have stopped
        assert (tokenizer.decode(whole.token_ids), whole.finish_reason) == (text, "stop")
    assert partial.finish(last(pieces[-1]), ["?"], tokenizer).finish_reason == "length"


def test_an_abort_with_the_last_possible_token_is_a_full_turn():
    partial = Partial()
    partial.keep(piece([5, 6]))
    assert partial.if_full(3) is None
    partial.keep(piece([7]))
    full = partial.if_full(3)
    assert full is not None
    assert (full.token_ids, full.finish_reason) == ((7,), "length")
    assert partial.token_ids == [5, 6]
