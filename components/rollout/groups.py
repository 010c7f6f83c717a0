"""Groups of trajectories: all samples of a prompt in one request per turn, on one engine, with retries elsewhere."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import httpx
import numpy as np

from colchis.components.config import OwnEnvironmentConfig, RunConfig
from colchis.components.environments import Environment, Episode, ModelTurn, TextModel
from colchis.components.errors import BadData, ColchisError, PeerUnavailable
from colchis.components.http_client import pool_client
from colchis.components.records.rows import Row
from colchis.components.records.trajectories import SegmentKind, Trajectory, trajectory_id
from colchis.components.rollout import standstill
from colchis.components.rollout.client import Completion, Fault, Refusal, generate
from colchis.components.rollout.engines import Balance, Engine, Engines
from colchis.components.rollout.episodes import Sample, in_thread
from colchis.components.rollout.partials import Partial
from colchis.components.rollout.sampling import Sampling, sampling_seed
from colchis.components.rollout.versions import Wanted

MAX_FAILURES = 10
"""Failed requests for one turn of one group, after which the shard gives up. Waiting for a ready engine counts none."""
OUTAGES = (Fault.HTTP, Fault.CONNECTION)
STANDSTILL_S = 30.0
"""Beyond an environment's own time limit, after which a process that does nothing at all is ended."""
LONGEST_PAUSE_S, LONGEST_OUTAGE_PAUSE_S = 2.0, 10.0
"""Between two failed requests. An engine that answers 500 or nothing may be restarting: ten tries span 20 s or more."""


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """One prompt of an iteration: `group` is its position there, `row` what is asked."""

    group: int
    row: Row


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """What a rollout did, in numbers."""

    groups: int
    samples: int
    turns: int
    tokens: int
    """Sampled by the policy."""
    prompt_tokens: int
    cached_tokens: int
    requests: int
    faults: dict[str, int]
    """Samples that were asked for again, by fault."""
    resumed_tokens: int
    """Of aborted answers, kept."""
    finish_reasons: dict[str, int]
    engines: dict[str, int]
    """Requests answered by each engine."""
    request_p95_s: float
    environment_s: float
    """Spent waiting for the environment's replies, summed over groups and turns."""
    seconds: float


@dataclass(slots=True)
class _Tally:
    groups: int = 0
    samples: int = 0
    turns: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    resumed_tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    engines: Counter[str] = field(default_factory=Counter)
    request_s: list[float] = field(default_factory=list)
    environment_s: float = 0.0
    last_fault: str = ""


async def rollout_groups(
    config: RunConfig,
    *,
    run: str,
    iteration: int,
    wanted: Wanted,
    groups: Sequence[PromptGroup],
    engines: Engines,
    environment: Environment,
    model: TextModel,
    on_group: Callable[[list[Trajectory]], None],
    sampling: Sampling | None = None,
) -> RolloutStats:
    """Generate all groups under the `wanted` policy. `on_group` gets each finished group, in a thread, one at a time, so
    that it may store it; a group is complete or absent. `sampling`: unset, as the configuration says.

    PeerUnavailable past `rollout.deadline_s` or when one group fails too often; BadData when an engine refuses a prompt
    or the environment cannot start an episode. Groups handed over before an error are good.
    """
    work = _Rollout(
        config, run, iteration, wanted, environment, model, on_group, sampling or Sampling.of(config.rollout)
    )
    began = time.monotonic()
    async with pool_client(keepalive=config.rollout.concurrency) as client:
        work.client, work.balance = client, Balance(engines, client, wanted)
        try:
            async with (
                _bounded(config),
                asyncio.timeout(config.rollout.deadline_s) as deadline,
                asyncio.TaskGroup() as tasks,
            ):
                for group in groups:
                    tasks.create_task(work.group(group))
        except TimeoutError:
            if not deadline.expired():
                raise
            raise PeerUnavailable(
                f"rollout of {wanted}: {work.tally.groups} of {len(groups)} groups within "
                f"{config.rollout.deadline_s:g} s (engines: {work.balance.describe()}; faults: "
                f"{dict(work.tally.faults) or 'none'}{'; last: ' + work.tally.last_fault if work.tally.last_fault else ''})",
                where=f"{run}/{iteration}",
                hint="look at the engines, or raise rollout.deadline_s",
            ) from None
        except BaseExceptionGroup as errors:
            ours = errors.subgroup(ColchisError)
            if ours is None:
                raise
            raise _first(ours) from errors
    return work.stats(time.monotonic() - began)


def _bounded(config: RunConfig) -> AbstractAsyncContextManager[None]:
    """What no timeout of an event loop catches: a user's environment that keeps the whole interpreter."""
    if not isinstance(config.environment, OwnEnvironmentConfig):
        return nullcontext()
    return standstill.bounded(config.rollout.environment_timeout_s + STANDSTILL_S)


def _first(errors: BaseExceptionGroup[ColchisError]) -> ColchisError:
    """One error to end with: of several groups' errors the first, after which the others were cancelled."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _pause_s(failures: int, *, outage: bool) -> float:
    """Exponential, with jitter; after outages at least half of it, so that the tries are not used up in a moment."""
    longest_s = LONGEST_OUTAGE_PAUSE_S if outage else LONGEST_PAUSE_S
    return random.uniform(0.5 if outage else 0.0, 1.0) * min(longest_s, 0.1 * 2.0**failures)


class _Rollout:
    """The parts of one call that every group needs."""

    client: httpx.AsyncClient
    balance: Balance

    def __init__(
        self,
        config: RunConfig,
        run: str,
        iteration: int,
        wanted: Wanted,
        environment: Environment,
        model: TextModel,
        on_group: Callable[[list[Trajectory]], None],
        sampling: Sampling,
    ) -> None:
        self.config, self.run, self.iteration, self.wanted = config, run, iteration, wanted
        self.environment, self.model, self.on_group, self.sampling = environment, model, on_group, sampling
        self.tokenizer = model.tokenizer
        self.longest_tokens = model.longest_tokens(config.trainer.micro_batch_tokens)
        self.tally = _Tally()
        self._slots = asyncio.Semaphore(config.rollout.concurrency)
        self._handing_over = asyncio.Lock()

    async def group(self, group: PromptGroup) -> None:
        """All samples of one prompt, turn by turn; one request in flight."""
        async with self._slots:
            samples = await self._start(group.row)
            for turn in range(self.config.rollout.max_turns):
                await self._turn([s for s in samples if s.open], group, turn)
                if not any(s.open for s in samples):
                    break
            digest = self.sampling.digest()
            trajectories = [
                s.trajectory(
                    trajectory_id(self.run, self.iteration, group.row.index, s.number),
                    iteration=self.iteration,
                    prompt_index=group.row.index,
                    group=group.group,
                    sampling_digest=digest,
                )
                for s in samples
            ]
        async with self._handing_over:
            await asyncio.to_thread(self.on_group, trajectories)
        self._count(trajectories)

    async def _start(self, row: Row) -> list[Sample]:
        seeds = [
            sampling_seed(self.config.loop.seed, self.iteration, row.index, n) for n in range(self.sampling.samples)
        ]
        timeout_s = self.config.rollout.environment_timeout_s

        def begin(seed: int) -> tuple[Episode, str | list[int]]:
            episode = self.environment.start(row, seed)
            prompt = episode.prompt()
            return episode, prompt if isinstance(prompt, str) else [int(i) for i in prompt]

        try:
            started = await asyncio.gather(*(in_thread(partial(begin, s), timeout_s) for s in seeds))
        except ColchisError:
            raise
        except TimeoutError:
            raise BadData(f"row {row.index}: the environment did not start within {timeout_s:g} s") from None
        except Exception as e:  # the environment's own code may raise anything
            raise BadData(f"row {row.index}: the environment cannot start ({type(e).__name__}: {e})") from e
        first = started[0][1]
        if any(prompt != first for _, prompt in started):
            raise BadData(
                f"row {row.index}: the samples of a group got different prompts, which have no common baseline"
            )
        ids = self.tokenizer.encode_prompt(first) if isinstance(first, str) else first
        longest = self.longest_tokens - self.sampling.max_new_tokens
        if not 1 <= len(ids) <= longest:
            raise BadData(
                f"row {row.index}: the prompt has {len(ids)} tokens, expected 1 to {longest}",
                hint="shorten the prompts, or raise trainer.micro_batch_tokens or the model's context",
            )
        strange = self.model.outside(ids)
        if strange is not None:  # the prompts were looked at when the run began, but one may depend on its seed
            raise BadData(
                f"row {row.index}: the prompt has token id {strange}, the model's vocabulary ends at "
                f"{self.model.vocabulary_size}",
                hint="an engine may end on such a token: look at the environment's prompt",
            )
        return [
            Sample(number=n, seed=seed, episode=episode, prompt_ids=ids)
            for n, (seed, (episode, _)) in enumerate(zip(seeds, started, strict=True))
        ]

    async def _turn(self, samples: list[Sample], group: PromptGroup, turn: int) -> None:
        """One model turn of every open sample, then the environment's replies, all at once."""
        missing = {s.number: s for s in samples}
        partials = {s.number: Partial() for s in samples}
        turns: dict[int, ModelTurn] = {}
        avoid: set[str] = set()
        failures = 0
        began = time.monotonic()
        while missing:
            asked = list(missing.values())
            prefer = asked[0].engines[-1] if asked[0].engines else None
            engine = await self.balance.take(len(asked), prefer=prefer, avoid=avoid)
            answers = await self._ask(engine, asked, partials, group.row, turn)
            progress = False
            for sample, answer in zip(asked, answers, strict=True):
                partial = partials[sample.number]
                if isinstance(answer, Refusal):
                    progress |= self._refused(engine, answer, sample, partial)
                    last = partial.if_full(self.sampling.max_new_tokens)
                else:
                    last = answer
                if last is not None:
                    turns[sample.number] = sample.append_turn(
                        partial.finish(last, self.sampling.stop, self.tokenizer),
                        engine=engine,
                        seconds=time.monotonic() - began,
                        tokenizer=self.tokenizer,
                    )
                    del missing[sample.number]
            if missing:
                failures = 0 if progress else failures + 1
                avoid.add(engine.id)
                if failures >= MAX_FAILURES:
                    raise PeerUnavailable(
                        f"row {group.row.index}, turn {turn}: {failures} requests to engines of {self.wanted} failed "
                        f"(last: {self.tally.last_fault}; faults: {dict(self.tally.faults)})",
                        where=f"{self.run}/{self.iteration}",
                        hint="look at the engines' logs",
                    )
                outage = any(isinstance(a, Refusal) and a.fault in OUTAGES for a in answers)
                await asyncio.sleep(_pause_s(failures, outage=outage))
        await self._replies(samples, turns, last=turn + 1 == self.config.rollout.max_turns)

    async def _ask(
        self, engine: Engine, asked: Sequence[Sample], partials: Mapping[int, Partial], row: Row, turn: int
    ) -> list[Completion | Refusal]:
        """One request for what is missing of each sample's turn."""
        drawn = [partials[s.number].token_ids for s in asked]
        began = time.monotonic()
        ok = False
        try:
            answers = await generate(
                self.client,
                engine,
                [s.token_ids + ids for s, ids in zip(asked, drawn, strict=True)],
                [
                    self.sampling.parameters(self._seed(s, row, turn, len(ids)), drawn=len(ids))
                    for s, ids in zip(asked, drawn, strict=True)
                ],
                wanted=self.wanted,
                prove=self.balance.proven,
                headers=self.balance.engines.engine_headers,
                timeout_s=self.config.rollout.request_timeout_s,
            )
            ok = all(isinstance(a, Completion) for a in answers)
        finally:
            self.balance.give_back(engine, len(asked), failed=not ok)
        self.tally.request_s.append(time.monotonic() - began)
        self.tally.engines[engine.id] += 1
        return answers

    def _refused(self, engine: Engine, refusal: Refusal, sample: Sample, partial: Partial) -> bool:
        """Count it; keep what can be kept of it. Whether something was."""
        self.tally.faults[refusal.fault] += 1
        self.tally.last_fault = f"{engine.id}: {refusal.detail}"
        if refusal.partial is None or self.config.rollout.partials == "drop":
            return False
        partial.keep(refusal.partial)
        sample.drawn_by(engine)
        self.tally.resumed_tokens += len(refusal.partial.token_ids)
        return True

    def _seed(self, sample: Sample, row: Row, turn: int, drawn: int) -> int:
        return sampling_seed(self.config.loop.seed, self.iteration, row.index, sample.number, turn, drawn=drawn)

    async def _replies(self, samples: list[Sample], turns: dict[int, ModelTurn], *, last: bool) -> None:
        longest = self.longest_tokens - self.sampling.max_new_tokens
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for sample in samples:
                tasks.create_task(
                    sample.answer(
                        turns[sample.number],
                        last=last,
                        room_tokens=longest - len(sample.token_ids),
                        model=self.model,
                        timeout_s=self.config.rollout.environment_timeout_s,
                    )
                )
        self.tally.environment_s += time.monotonic() - began

    def _count(self, trajectories: list[Trajectory]) -> None:
        tally = self.tally
        tally.groups += 1
        tally.samples += len(trajectories)
        for t in trajectories:
            tally.turns += sum(s.kind is SegmentKind.MODEL for s in t.segments)
            tally.tokens += t.trained_tokens
            tally.prompt_tokens += t.prompt_tokens
            tally.cached_tokens += t.cached_tokens
            tally.finish_reasons[t.finish_reason] += 1

    def stats(self, seconds: float) -> RolloutStats:
        tally = self.tally
        return RolloutStats(
            groups=tally.groups,
            samples=tally.samples,
            turns=tally.turns,
            tokens=tally.tokens,
            prompt_tokens=tally.prompt_tokens,
            cached_tokens=tally.cached_tokens,
            requests=len(tally.request_s),
            faults=dict(tally.faults),
            resumed_tokens=tally.resumed_tokens,
            finish_reasons=dict(tally.finish_reasons),
            engines=dict(tally.engines),
            request_p95_s=float(np.quantile(tally.request_s, 0.95)) if tally.request_s else 0.0,
            environment_s=tally.environment_s,
            seconds=seconds,
        )
