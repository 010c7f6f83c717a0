"""One sample's sequence as it grows: the prompt, model turns, and what the environment says between them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeVar

from colchis.components.environments import Episode, ModelTurn, TextModel, Tokenizer
from colchis.components.errors import ColchisError
from colchis.components.records.run import now
from colchis.components.records.trajectories import Segment, SegmentKind, Trajectory, VersionSpan
from colchis.components.rollout.client import Completion
from colchis.components.rollout.engines import Engine

logger = logging.getLogger(__name__)
T = TypeVar("T")


_idle: list[SimpleQueue[Callable[[], None]]] = []
"""Threads that wait for their next call; each takes calls from a queue of its own."""


async def in_thread(call: Callable[[], T], timeout_s: float) -> T:
    """Run a call that may block, in a thread that cannot keep the process from ending (an executor's would). Threads
    are used again. TimeoutError past `timeout_s`: the thread is left behind with its call, its result ignored."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = call()
        except StopIteration as e:  # a future cannot carry it
            error = RuntimeError(f"StopIteration: {e}")
        except BaseException as e:  # carried to the caller, which decides
            error = e
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    try:
        calls = _idle.pop()
    except IndexError:
        calls = SimpleQueue()
        threading.Thread(target=_serve, args=(calls,), name="environment", daemon=True).start()
    calls.put(run)
    async with asyncio.timeout(timeout_s):
        return await done


def _serve(calls: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        calls.get()()
        _idle.append(calls)


@dataclass(slots=True)
class Sample:
    """Grows by whole turns; token ids are only ever appended."""

    number: int
    seed: int
    episode: Episode
    prompt_ids: list[int]
    started_at: str = field(default_factory=now)
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    engines: list[str] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: str = ""
    open: bool = True
    _began: float = field(default_factory=time.monotonic)
    _seconds: float = 0.0

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)
        self.loss_mask = [False] * len(self.prompt_ids)
        self.logprobs = [0.0] * len(self.prompt_ids)

    def append_turn(self, completion: Completion, *, engine: Engine, seconds: float, tokenizer: Tokenizer) -> ModelTurn:
        """Append what the policy drew, all of it trained."""
        start, end = len(self.token_ids), len(self.token_ids) + len(completion.token_ids)
        text = tokenizer.decode(completion.token_ids)
        if completion.stop_text is not None and completion.stop_text in text:
            text = text[: text.index(completion.stop_text)]
        self.token_ids += completion.token_ids
        self.loss_mask += [True] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.versions += [VersionSpan(v.version, start + v.start, start + v.end) for v in completion.versions]
        self.segments.append(Segment(SegmentKind.MODEL, start, end, seconds, text))
        self.cached_tokens += completion.cached_tokens
        self.finish_reason = completion.finish_reason
        self.drawn_by(engine)
        return ModelTurn(text, completion.token_ids, completion.finish_reason)

    def drawn_by(self, engine: Engine) -> None:
        """Record who drew tokens of it."""
        if engine.id not in self.engines:
            self.engines.append(engine.id)

    async def answer(
        self, turn: ModelTurn, *, last: bool, room_tokens: int, model: TextModel, timeout_s: float
    ) -> None:
        """Ask the environment and append its reply, or close the sample: at the end of the episode, when the turns are
        used up (`turns`), when the reply and one more turn would pass `room_tokens` (`context`), or when the environment
        fails (`environment_error`, `environment_timeout`: graders give these a reason, not a zero)."""
        began = time.monotonic()
        try:
            reply = await in_thread(lambda: self.episode.reply(turn), timeout_s)
            text, kind = (reply.text, SegmentKind(reply.kind)) if reply is not None else ("", SegmentKind.ENVIRONMENT)
            ids = model.tokenizer.encode_message(text)
        except TimeoutError:
            self._close("environment_timeout")
            logger.warning("the environment did not answer within %g s", timeout_s)
            return
        except ColchisError:
            raise
        except Exception:  # the environment's own code may raise anything; one episode's failure is not the run's
            self._close("environment_error")
            logger.warning("the environment failed in an episode", exc_info=True)
            return
        if reply is None:
            self._close(self.finish_reason)
        elif last:
            self._close("turns")
        elif len(ids) > room_tokens:
            self._close("context")
        elif kind is SegmentKind.MODEL:
            self._close("environment_error")
            logger.warning("the environment answered with a reply of kind 'model', expected 'environment' or 'tool'")
        elif (strange := model.outside(ids)) is not None:
            self._close("environment_error")
            logger.warning(
                "the environment's reply has token id %d, the model's vocabulary ends at %d: an engine may end on it",
                strange,
                model.vocabulary_size,
            )
        else:
            start = len(self.token_ids)
            self.token_ids += ids
            self.loss_mask += [False] * len(ids)
            self.logprobs += [0.0] * len(ids)
            self.segments.append(Segment(kind, start, start + len(ids), time.monotonic() - began, text))

    def _close(self, finish_reason: str) -> None:
        self.open = False
        self.finish_reason = finish_reason
        self._seconds = time.monotonic() - self._began

    def trajectory(self, id: str, *, iteration: int, prompt_index: int, group: int, sampling_digest: str) -> Trajectory:
        return Trajectory(
            id=id,
            iteration=iteration,
            prompt_index=prompt_index,
            group=group,
            sample=self.number,
            token_ids=self.token_ids,
            loss_mask=self.loss_mask,
            logprobs=self.logprobs,
            versions=self.versions,
            segments=self.segments,
            prompt_tokens=len(self.prompt_ids),
            finish_reason=self.finish_reason,
            seed=self.seed,
            engine=",".join(self.engines),
            sampling_digest=sampling_digest,
            started_at=self.started_at,
            seconds=self._seconds,
            cached_tokens=self.cached_tokens,
        )
