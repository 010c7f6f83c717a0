"""Environments that fail, hang or contradict themselves: an episode's failure is a reason, a prompt's is refused."""

from __future__ import annotations

import threading

import pytest

from colchis.components.environments import Reply
from colchis.components.errors import BadData, Temporary
from colchis.components.records.trajectories import SegmentKind
from colchis.components.rollout import Engines
from tests.rollout.fault_server import FaultServer


class Episodes:
    """An environment whose episodes run `act(episode)` as their reply."""

    version = "1"

    def __init__(self, act=lambda episode: None, prompt=lambda row, seed: row.prompt) -> None:
        self.act, self.of = act, prompt
        self.started: list[OneEpisode] = []

    def prompts(self):
        return []

    def start(self, row, seed):
        episode = OneEpisode(self.act, self.of(row, seed), len(self.started))
        self.started.append(episode)
        return episode


class OneEpisode:
    def __init__(self, act, prompt, number) -> None:
        self.act, self._prompt, self.number, self.turns = act, prompt, number, []

    def prompt(self):
        return self._prompt

    def reply(self, turn):
        self.turns.append(turn)
        return self.act(self)

    def score(self):
        return None


@pytest.fixture
def server():
    with FaultServer() as running:
        yield running


def test_an_environment_that_fails_ends_its_episode_only(generate, server, caplog):
    def act(episode):
        if episode.number == 2:
            raise RuntimeError("sandbox gone")

    arrived, stats = generate(Engines.at([server.url]), groups=1, environment=Episodes(act))
    reasons = sorted(t.finish_reason for t in arrived[0])
    assert reasons == ["environment_error", "stop", "stop", "stop"]
    assert stats.finish_reasons == {"environment_error": 1, "stop": 3}
    assert "sandbox gone" in caplog.text


def test_an_environment_that_hangs_is_left_behind(generate, server):
    release = threading.Event()

    def act(episode):
        if episode.number == 0:
            release.wait(30)

    arrived, _ = generate(Engines.at([server.url]), groups=1, environment=Episodes(act), environment_timeout_s=2.0)
    release.set()
    assert sorted(t.finish_reason for t in arrived[0]) == ["environment_timeout", "stop", "stop", "stop"]


def test_an_error_of_our_own_family_ends_the_rollout(generate, server):
    def act(episode):
        raise Temporary("the search index is being rebuilt")

    with pytest.raises(Temporary, match="rebuilt"):
        generate(Engines.at([server.url]), groups=1, environment=Episodes(act))


@pytest.mark.parametrize("act", [lambda e: "text", lambda e: Reply("x", "model"), lambda e: Reply("x", "nobody")])
def test_a_reply_of_the_wrong_kind_is_an_environment_error(generate, server, act):
    """A reply marked as the model's would be trained on."""
    arrived, _ = generate(Engines.at([server.url]), groups=1, environment=Episodes(act), max_turns=2)
    assert {t.finish_reason for t in arrived[0]} == {"environment_error"}
    assert all(len(t.segments) == 1 for t in arrived[0])


def test_a_reply_that_leaves_no_room_ends_the_episode(generate, server):
    """Longer than trainer.micro_batch_tokens (64 here) would be refused by the trainer, a whole iteration later."""
    arrived, _ = generate(
        Engines.at([server.url]), groups=1, environment=Episodes(lambda e: Reply("12345678\n")), max_turns=10
    )
    for t in arrived[0]:
        assert t.finish_reason == "context"
        assert t.segments[-1].kind is SegmentKind.MODEL
        assert len(t.token_ids) <= 64


def test_a_reply_that_passes_the_context_of_the_model_ends_the_episode(generate, server):
    """The engine would refuse the next turn, and one long tool output would end the whole run."""
    arrived, _ = generate(
        Engines.at([server.url]),
        groups=1,
        environment=Episodes(lambda e: Reply("12345678\n")),
        max_turns=10,
        context_tokens=40,
    )
    for t in arrived[0]:
        assert t.finish_reason == "context"
        assert len(t.token_ids) <= 40


def test_an_empty_reply_lets_the_model_go_on(generate, server):
    arrived, _ = generate(Engines.at([server.url]), groups=1, environment=Episodes(lambda e: Reply("")), max_turns=2)
    for t in arrived[0]:
        assert t.finish_reason == "turns"
        assert [s.kind for s in t.segments] == [SegmentKind.MODEL, SegmentKind.ENVIRONMENT, SegmentKind.MODEL]


def test_prompts_may_be_token_ids(generate, server):
    environment = Episodes(prompt=lambda row, seed: (5, 6, 7))
    arrived, _ = generate(Engines.at([server.url]), groups=1, environment=environment)
    assert all(t.token_ids[:3] == [5, 6, 7] and t.prompt_tokens == 3 for t in arrived[0])
    told = sorted(list(episode.turns[0].token_ids) for episode in environment.started)
    assert told == sorted(t.token_ids[3:] for t in arrived[0])


def test_a_group_with_two_prompts_is_refused(generate, server):
    """Samples of different prompts have no common baseline."""
    with pytest.raises(BadData, match="row 1: the samples of a group got different prompts"):
        generate(Engines.at([server.url]), groups=1, environment=Episodes(prompt=lambda row, seed: f"{seed}"))


def test_an_episode_that_cannot_start_names_its_row(generate, server):
    def prompt(row, seed):
        raise KeyError("file")

    with pytest.raises(BadData, match=r"row 1: the environment cannot start \(KeyError: 'file'\)"):
        generate(Engines.at([server.url]), groups=1, environment=Episodes(prompt=prompt))
    release = threading.Event()
    with pytest.raises(BadData, match=r"row 1: the environment did not start within 2 s"):
        generate(
            Engines.at([server.url]),
            groups=1,
            environment=Episodes(prompt=lambda row, seed: release.wait(20)),
            environment_timeout_s=2.0,
        )
    release.set()


def test_a_prompt_without_tokens_is_refused(generate, server):
    with pytest.raises(BadData, match="the prompt has 0 tokens"):
        generate(Engines.at([server.url]), groups=1, environment=Episodes(prompt=lambda row, seed: "üü"))
