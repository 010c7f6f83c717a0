"""/generate as a bare ASGI endpoint: short answers are so cheap to decode that a framework's layers would dominate."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from pydantic_core import to_json
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from colchis.components.engine.generate import Generation, answer, parse_generate
from colchis.components.engine.service import Engine, Waiter, refusal
from colchis.components.errors import BadData, PeerUnavailable

WATCH_AFTER_S = 0.1
"""A request that takes longer is ended when its client hangs up; a shorter one is done sooner than that would help."""


class GenerateRoute:
    """Parses, submits, waits for the samples or for the client to hang up, and answers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await _read_body(receive)
        if raw is None:
            return
        try:
            generation = self._parse(raw)
        except BadData as error:
            await refusal(str(error), 400)(scope, receive, send)
            return
        except PeerUnavailable as error:
            await refusal(str(error), 503)(scope, receive, send)
            return
        waiter = self.engine.submit(generation)
        if generation.stream:
            await StreamingResponse(self._stream(waiter), media_type="text/event-stream")(scope, receive, send)
            return
        watch = Watch(receive, waiter)
        await waiter.done
        watch.end()
        if waiter.open:
            self.engine.drop(generation, "the client disconnected")
            return
        await self._answer(generation, send)

    def _parse(self, raw: bytes) -> Generation:
        serving = self.engine.require_model()
        return parse_generate(raw, self.engine.settings, serving.architecture, serving.eos_token_ids, self.engine.text)

    async def _answer(self, generation: Generation, send: Send) -> None:
        engine = self.engine
        engine.counters.requests.inc()
        version = engine.scheduler.weight_version
        answers = [answer(generation, sample, engine.text, version) for sample in generation.samples]
        content = to_json(answers[0] if generation.single else answers, inf_nan_mode="constants")
        length = str(len(content)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _stream(self, waiter: Waiter) -> AsyncIterator[str]:
        """Server-sent events: the output so far of one sample each, cumulative as SGLang's default."""
        engine, generation = self.engine, waiter.generation
        numbers = {id(sample): number for number, sample in enumerate(generation.samples)}
        left = len(numbers)
        try:
            while left:
                sample, piece = await waiter.pieces.get()
                so_far = None if piece is None else (piece.output_ids, piece.logprobs)
                left -= piece is None
                message = answer(generation, sample, engine.text, engine.scheduler.weight_version, so_far)
                if not generation.single:
                    message["index"] = numbers[id(sample)]
                yield f"data: {json.dumps(message)}\n\n"
            engine.counters.requests.inc()
            yield "data: [DONE]\n\n"
        finally:
            if left:
                engine.drop(generation, "the client disconnected")


async def _read_body(receive: Receive) -> bytes | None:
    """The whole request body; None when the client hung up before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


class Watch:
    """Ends the wait when the client hangs up; `waiter.open` then still counts unfinished samples.

    It starts late: a task for each short request would cost as much as parsing it.
    """

    def __init__(self, receive: Receive, waiter: Waiter) -> None:
        self._receive, self._waiter = receive, waiter
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._start)

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        if not self._waiter.done.done():
            self._waiter.done.set_result(None)

    def end(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
