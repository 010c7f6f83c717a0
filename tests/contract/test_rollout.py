"""The rollout's own client through an update of the weights: which version drew which token, on either engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from colchis.components.config import RunConfig, parse
from colchis.components.environments import ModelTurn, Reply, SingleTurn, TextModel, Tokenizer
from colchis.components.errors import BadData
from colchis.components.records.rows import Row, Split
from colchis.components.records.trajectories import Trajectory
from colchis.components.rollout import Engines, PromptGroup, RolloutStats, Sampling, Wanted, rollout_groups
from tests.agent.conftest import TOKEN, AgentProcess
from tests.contract.test_control import pause, resume
from tests.engine.processes import EngineProcess
from tests.engine.test_logprobs import reference
from tests.waiting import eventually

TOKENS, SAMPLES = 600, 4


class Prompt(SingleTurn):
    """Token ids, so that nothing depends on a tokenizer."""

    def prompt(self) -> list[int]:
        return [5, 3, 8]


class Environment:
    """One turn."""

    version = "1"

    def prompts(self) -> list[Row]:
        return []

    def start(self, row: Row, seed: int) -> Prompt:
        return Prompt(row)


class Strange(Environment):
    """Its prompt, or its reply, has a token that the model does not know: an id of its own making, or a tokenizer that is
    larger than the model's embedding."""

    def __init__(self, prompt: list[int], reply: str | None) -> None:
        self.ids, self.text = prompt, reply

    def start(self, row: Row, seed: int) -> StrangePrompt:
        return StrangePrompt(row, self.ids, self.text)


class StrangePrompt(Prompt):
    def __init__(self, row: Row, ids: list[int], text: str | None) -> None:
        super().__init__(row)
        self.ids, self.text = ids, text

    def prompt(self) -> list[int]:
        return self.ids

    def reply(self, turn: ModelTurn) -> Reply | None:
        return None if self.text is None else Reply(self.text)


class Endless(Sampling):
    """Every answer has all its tokens, so that an update meets it."""

    def parameters(self, seed: int, *, drawn: int = 0) -> dict[str, Any]:
        return super().parameters(seed, drawn=drawn) | {"ignore_eos": True}


Result = tuple[list[Trajectory], RolloutStats]


def configuration(**rollout: Any) -> RunConfig:
    return parse(
        {
            "model": {"source": "file:x"},
            "environment": {"kind": "own", "name": "x"},
            "rollout": {"prompts": 1, "group_size": SAMPLES, "max_new_tokens": TOKENS, "deadline_s": 180} | rollout,
            "trainer": {"micro_batch_tokens": 1024},
        }
    )


def roll(engines: Engines, model: Path, wanted: Wanted, partials: str = "drop") -> Result:
    """A rollout of one group, to its end."""
    config = configuration(partials=partials)
    groups: list[list[Trajectory]] = []
    stats = asyncio.run(
        rollout_groups(
            config,
            run="r",
            iteration=0,
            wanted=wanted,
            groups=[PromptGroup(0, Row(0, "", "", Split.TRAIN))],
            engines=engines,
            environment=Environment(),
            model=TextModel.from_folder(model),
            on_group=groups.append,
            sampling=Endless.of(config.rollout),
        )
    )
    return groups[0], stats


@contextmanager
def rolling(
    engine: EngineProcess, model: Path, wanted: Wanted, partials: str, *, agent: AgentProcess | None = None
) -> Iterator[Future[Result]]:
    """A rollout of one group that has begun to draw when the block starts. `agent`: the one to ask about the engine, if any."""
    engines = Engines([agent.url], token=TOKEN) if agent else Engines.at([engine.url])
    with ThreadPoolExecutor(1) as pool:
        rolled = pool.submit(roll, engines, model, wanted, partials)
        running = threading.Event()

        def begun() -> bool:
            if rolled.done():
                rolled.result()
            return engine.busy()

        eventually(begun, "it has begun")
        running.wait(0.15)
        yield rolled


def check(trajectory: Trajectory, models: dict[int, Path]) -> None:
    """Every token has the log-probability that the version of its span gives it."""
    for span in trajectory.versions:
        expected = reference(models[span.version], trajectory.token_ids)
        for at in range(span.start, span.end):
            found = float(expected[at - 1, trajectory.token_ids[at]])
            assert trajectory.logprobs[at] == pytest.approx(found, abs=5e-5), (span, at)


@pytest.mark.parametrize(("mode", "partials"), [("retract", "drop"), ("abort", "resume")])
def test_an_update_in_the_middle_is_told_token_by_token(
    engine: EngineProcess, models: dict[str, Path], mode: str, partials: str
) -> None:
    """Fault: tokens lost, drawn twice, or said to be of a version that did not draw them."""
    with rolling(engine, models["qwen2_a"], Wanted.at_least(0), partials) as rolled:
        pause(engine, mode)
        assert engine.update(models["qwen2_b"], weight_version="1", flush_cache=True).status_code == 200
        resume(engine)
        group, stats = rolled.result(120)
    assert len(group) == SAMPLES
    by_version: dict[int, Any] = {0: models["qwen2_a"], 1: models["qwen2_b"]}
    changed = [t for t in group if [v.version for v in t.versions] == [0, 1]]
    assert changed, "the update met no sample; their spans: " + str([t.versions for t in group])
    for t in group:
        assert (t.versions[0].start, t.versions[-1].end) == (3, len(t.token_ids))
        assert all(a.end == b.start for a, b in zip(t.versions, t.versions[1:], strict=False))
        check(t, by_version)
    assert (stats.resumed_tokens > 0) == (mode == "abort")
    if mode == "retract":
        assert stats.requests == 1, "nothing was asked for twice"


def test_exactly_one_version_refuses_what_an_update_split(engine: EngineProcess, models: dict[str, Path]) -> None:
    """Fault: a sample half of another policy in a synchronous run."""
    with rolling(engine, models["qwen2_a"], Wanted.exactly(0), "resume") as rolled:
        pause(engine, "retract")
        assert engine.update(models["qwen2_b"], weight_version="1", flush_cache=True).status_code == 200
        resume(engine)
        eventually(lambda: not engine.busy(), "nothing is in flight")
        assert not rolled.done(), "no engine serves version 0 now, so it waits"
        assert engine.update(models["qwen2_a"], weight_version="0", flush_cache=True).status_code == 200
        group, stats = rolled.result(120)
    assert [[v.version for v in t.versions] for t in group] == [[0]] * SAMPLES
    assert stats.faults.get("wrong_version", 0) >= 1
    for t in group:
        check(t, {0: models["qwen2_a"]})


def roll_strangely(engine: EngineProcess, model: TextModel, environment: Environment) -> list[Trajectory]:
    """One group of two turns."""
    groups: list[list[Trajectory]] = []
    config = configuration(max_new_tokens=4, max_turns=2)
    asyncio.run(
        rollout_groups(
            config,
            run="r",
            iteration=0,
            wanted=Wanted.exactly(0),
            groups=[PromptGroup(0, Row(0, "", "", Split.TRAIN))],
            engines=Engines.at([engine.url]),
            environment=environment,
            model=model,
            on_group=groups.append,
            sampling=Endless.of(config.rollout),
        )
    )
    return groups[0]


def test_a_token_outside_the_vocabulary_never_reaches_the_engine(
    engine: EngineProcess, models: dict[str, Path]
) -> None:
    """Fault: one row of an environment ends every engine of the pool, one after the other: SGLang dies of such a token, and
    the request is tried again elsewhere."""
    known = TextModel.from_folder(models["qwen2_a"])
    for token in (100, 127, 1 << 30, -1):
        with pytest.raises(BadData, match=f"row 0: the prompt has token id {token}, .* vocabulary ends at 100"):
            roll_strangely(engine, known, Strange([5, 3, token], None))
    engine.sample([1, 2])
    larger = tokenizers.Tokenizer.from_file(str(models["qwen2_a"] / "tokenizer.json"))
    larger.add_special_tokens([f"<more{number}>" for number in range(60)])
    model = TextModel(Tokenizer(larger), known.vocabulary_size)
    good = roll_strangely(engine, model, Strange([5, 3], "A"))
    assert {(t.finish_reason, len(t.segments)) for t in good} == {("turns", 3)}
    bad = roll_strangely(engine, model, Strange([5, 3], "<more59>"))
    assert {(t.finish_reason, len(t.segments)) for t in bad} == {("environment_error", 1)}
    engine.sample([1, 2])
