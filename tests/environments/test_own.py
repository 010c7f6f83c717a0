"""The example package, installed as a user's package is: built as a wheel and put on the path."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from colchis.components.config import load
from colchis.components.environments import TextModel, Tokenizer, check_prompts, generate_rows, open_environment
from colchis.components.errors import BadConfig, BadData
from colchis.components.grader import grade
from colchis.components.records.trajectories import Segment, SegmentKind, Trajectory, VersionSpan
from colchis.components.records.verdicts import Reason
from colchis.components.rollout import Engines, PromptGroup, Wanted, rollout_groups
from tests.rollout.conftest import character_tokenizer
from tests.rollout.fault_server import FaultServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "own-environment"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Where the example is installed."""
    folder = tmp_path_factory.mktemp("own")
    source = folder / "source"
    shutil.copytree(EXAMPLE, source)
    code = f"import hatchling.build; print(hatchling.build.build_wheel({str(folder)!r}))"
    wheel = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(folder / wheel.stdout.split()[-1]) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def installed(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))


@pytest.fixture
def config(installed):
    return load(EXAMPLE / "run.yaml")


TOKENIZER = Tokenizer(character_tokenizer())
MODEL = TextModel(TOKENIZER, TOKENIZER.vocabulary_size)


class Scripted(FaultServer):
    """An engine whose policy says what `says` has for each turn."""

    def __init__(self, says: list[str]) -> None:
        super().__init__(version=0)
        self.says = says

    def misbehave(self, handler, body, fault):
        items = []
        for ids, parameters in zip(body["input_ids"], body["sampling_params"], strict=True):
            turn = self.says[min(len(self.requests), len(self.says)) - 1]
            out = [*TOKENIZER.encode_message(turn), 1][: parameters["max_new_tokens"]]
            items.append(
                {
                    "output_ids": out,
                    "meta_info": {
                        "finish_reason": {"type": "stop"},
                        "weight_version": "0",
                        "cached_tokens": len(ids),
                        "output_token_logprobs": [[-1.0, i, None] for i in out],
                    },
                }
            )
        self.send(handler, 200, items)


def play(config, says, row):
    groups = []
    with Scripted(says) as server:
        stats = asyncio.run(
            rollout_groups(
                config,
                run="r",
                iteration=0,
                wanted=Wanted.exactly(0),
                groups=[PromptGroup(0, row)],
                engines=Engines.at([server.url]),
                environment=open_environment(config.environment),
                model=MODEL,
                on_group=groups.append,
            )
        )
    return groups[0], stats, server


def test_two_turns_with_a_tool_from_prompt_to_verdict(config):
    """Tokens of the tool are masked, the policy's ids pass through unchanged, and the replay gives the score."""
    rows = generate_rows(config.environment)
    row = rows[0]
    a, b = row.prompt.split("+")[0].split("*")
    samples, stats, server = play(config, [f"[{a}*{b}]", row.answer], row)
    assert len(server.requests) == 2
    t = samples[0]
    assert [s.kind for s in t.segments] == [SegmentKind.MODEL, SegmentKind.TOOL, SegmentKind.MODEL]
    assert [s.text for s in t.segments] == [f"[{a}*{b}]", f"{int(a) * int(b)}\n", row.answer]
    assert server.requests[1]["input_ids"][0] == t.token_ids[: t.segments[1].end], "the second turn saw other tokens"
    assert len(t.versions) == 2
    for segment in t.segments:
        expected = segment.kind is SegmentKind.MODEL
        assert t.loss_mask[segment.start : segment.end] == [expected] * (segment.end - segment.start)
    assert t.finish_reason == "stop"
    assert (stats.turns, stats.requests) == (16, 2)
    seeds = [{p["sampling_seed"] for p in r["sampling_params"]} for r in server.requests]
    assert not seeds[0] & seeds[1], "the second turn repeats the draws of the first"

    verdicts = grade(config, samples, rows)
    assert [v.score for v in verdicts] == [pytest.approx(0.9)] * 8
    assert {(v.grader, v.grader_version) for v in verdicts} == {("environment", "1")}


def test_an_episode_that_never_ends_is_cut_at_max_turns(config):
    row = generate_rows(config.environment)[0]
    samples, _, server = play(config, ["[1+1]"], row)
    assert len(server.requests) == 3
    assert samples[0].finish_reason == "turns"
    assert samples[0].segments[-1].kind is SegmentKind.MODEL, "a reply that nobody reads was appended"
    (verdict, *_) = grade(config, samples, generate_rows(config.environment))
    assert verdict.score == pytest.approx(-0.3)


def test_own_grader_by_entry_point(config):
    rows = generate_rows(config.environment)
    samples, _, _ = play(config, [str(int(rows[0].answer) + 5)], rows[0])
    own = config.model_copy(
        update={
            "grader": config.grader.model_copy(update={"face": "own", "name": "closeness", "options": {"scale": 5}})
        }
    )
    (verdict, *_) = grade(own, samples, rows)
    assert (verdict.score, verdict.detail) == (0.5, "off by 5")
    assert (verdict.grader, verdict.grader_version) == ("own:closeness", "calculator-task 0.1.0")
    for change, message in (
        ({"options": {"no": 1}}, "cannot be constructed .*'no'"),
        ({"name": "x"}, "installed: closeness"),
    ):
        wrong = own.model_copy(update={"grader": own.grader.model_copy(update=change)})
        with pytest.raises(BadConfig, match=message):
            grade(wrong, samples, rows)


def test_replay_that_differs_from_the_record_gives_no_score(config):
    """An environment that depends on more than row, seed and turns would score another episode than the trained one."""
    rows = generate_rows(config.environment)
    prompt = TOKENIZER.encode_prompt(rows[0].prompt)
    call, reply, final = (TOKENIZER.encode_message(s) for s in ("[1+1]", "3\n", "4"))
    n, m, k, e = len(prompt), len(prompt) + len(call), len(prompt) + len(call) + len(reply), 0
    e = k + len(final)
    trajectory = Trajectory(
        id="r/0/0/0",
        iteration=0,
        prompt_index=0,
        group=0,
        sample=0,
        token_ids=[*prompt, *call, *reply, *final],
        loss_mask=[n <= i < m or i >= k for i in range(e)],
        logprobs=[0.0] * e,
        versions=[VersionSpan(0, n, m), VersionSpan(0, k, e)],
        segments=[
            Segment(SegmentKind.MODEL, n, m, 0.0, "[1+1]"),
            Segment(SegmentKind.TOOL, m, k, 0.0, "3\n"),
            Segment(SegmentKind.MODEL, k, e, 0.0, "4"),
        ],
        prompt_tokens=n,
        finish_reason="stop",
        seed=0,
        engine="e",
        sampling_digest="",
        started_at="",
        seconds=0.0,
        cached_tokens=0,
    )
    (verdict,) = grade(config, [trajectory], rows)
    assert verdict.reason is Reason.SANDBOX_ERROR
    assert "answered '2\\n', recorded was '3\\n'" in verdict.detail


def test_constructor_that_fails_is_bad_configuration(config):
    wrong = config.environment.model_copy(update={"options": {"colour": "red"}})
    with pytest.raises(BadConfig, match=r"environment 'calculator' cannot be constructed .*colour"):
        open_environment(wrong)


def test_prompts_are_checked_against_the_tokenizer(config):
    """A tokenizer without an unknown token drops what it cannot read, and the policy is asked something else."""
    rows = generate_rows(config.environment)
    environment = open_environment(config.environment)
    check_prompts(environment, rows, MODEL, longest_tokens=40)
    with pytest.raises(BadData, match="tokens, at most 3"):
        check_prompts(environment, rows, MODEL, longest_tokens=3)
    with pytest.raises(BadData, match="outside the vocabulary of 5"):
        check_prompts(environment, rows, TextModel(TOKENIZER, 5), longest_tokens=40)
    assert TOKENIZER.lost_character("1+ü=") == "ü"
    assert TOKENIZER.lost_character("1+1=") is None
