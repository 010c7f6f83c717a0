"""/generate as a bare ASGI endpoint: short answers are so cheap to decode that a framework's layers would dominate."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from colchis.components.engine.generate import Generation, answer, parse_generate
from colchis.components.engine.service import Engine, Waiter, refusal
from colchis.components.errors import BadData, PeerUnavailable


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
        watch = asyncio.get_running_loop().create_task(_watch_connection(receive, waiter))
        await waiter.done
        watch.cancel()
        if waiter.open:
            self.engine.drop(generation, "the client disconnected")
            return
        await self._answer(generation)(scope, receive, send)

    def _parse(self, raw: bytes) -> Generation:
        serving = self.engine.require_model()
        return parse_generate(raw, self.engine.settings, serving.architecture, serving.eos_token_ids, self.engine.text)

    def _answer(self, generation: Generation) -> Response:
        engine = self.engine
        engine.counters.requests.inc()
        version = engine.scheduler.weight_version
        answers = [answer(generation, sample, engine.text, version) for sample in generation.samples]
        content = json.dumps(answers[0] if generation.single else answers).encode()
        return Response(content, media_type="application/json")

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


async def _watch_connection(receive: Receive, waiter: Waiter) -> None:
    """Ends the wait when the client hangs up; `waiter.open` then still counts unfinished samples."""
    while (await receive())["type"] != "http.disconnect":
        continue
    if not waiter.done.done():
        waiter.done.set_result(None)
