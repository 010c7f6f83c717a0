"""One request to an engine's /generate, and the checks that an answer must pass before a token of it is kept.

An engine may answer 200 and be wrong: with an aborted request, under another weight version, with log-probabilities
that are not numbers or belong to other tokens. Such samples come back as a `Refusal` and are never trained on.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx
import numpy as np

from colchis.components.errors import BadData
from colchis.components.records.trajectories import LOGPROB_SLACK, VersionSpan, joined
from colchis.components.rollout.engines import Engine, wants_key
from colchis.components.rollout.versions import Wanted
from colchis.components.weights import labels


class Fault(StrEnum):
    """Why an answer, or one sample of it, was not taken. Each is counted."""

    TIMEOUT = "timeout"
    CONNECTION = "connection"
    HTTP = "http"
    ABORTED = "aborted"
    WRONG_VERSION = "wrong_version"
    MALFORMED = "malformed"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A sample that must be asked for again."""

    fault: Fault
    detail: str
    partial: Piece | None = None
    """What the engine had drawn when it aborted the request: good tokens of an answer that is not finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens that passed every check. `token_ids` and `logprobs` have equal length, at least 1."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    """Cover all tokens, counted from the first of them."""
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(Piece):
    """One accepted model turn."""

    finish_reason: str
    """`stop` or `length`."""
    stop_text: str | None
    """The stop text that ended it, when one did."""


Prove = Callable[[Engine, set[str], float], Awaitable[Mapping[str, int]]]
"""(engine, marks of loads, seconds) -> the versions that they were proven to be."""


async def generate(
    client: httpx.AsyncClient,
    engine: Engine,
    inputs: Sequence[Sequence[int]],
    parameters: Sequence[dict[str, Any]],
    *,
    wanted: Wanted,
    prove: Prove,
    headers: Mapping[str, str],
    timeout_s: float,
) -> list[Completion | Refusal]:
    """One batched request: `inputs[i]` sampled with `parameters[i]`. Where an update met it, `prove` is asked what drew the
    tokens right after the load. Never raises for what another engine may do better. BadData when the engine calls the request
    itself bad, BadConfig when it wants a key."""
    body = {
        "input_ids": [list(ids) for ids in inputs],
        "sampling_params": list(parameters),
        "return_logprob": True,
        "logprob_start_len": -1,
    }
    if engine.adapter is not None:
        body["lora_path"] = engine.adapter.name
    try:
        async with asyncio.timeout(timeout_s):  # httpx bounds each read, not the whole answer
            answer = await client.post(f"{engine.url}/generate", json=body, headers=headers, timeout=timeout_s)
    except (TimeoutError, httpx.TimeoutException):
        return _all(inputs, Fault.TIMEOUT, f"no answer within {timeout_s:g} s")
    except httpx.HTTPError as e:
        return _all(inputs, Fault.CONNECTION, f"{type(e).__name__} {e}".strip())
    if answer.status_code == 400 and not _is_about_adapter(answer, engine):
        raise BadData(f"the engine refuses a request of {wanted}: {_message(answer)}", where=engine.url)
    if answer.status_code in (401, 403):
        raise wants_key(engine)
    if answer.status_code != 200:
        return _all(inputs, Fault.HTTP, f"HTTP {answer.status_code}: {_message(answer)}")
    try:
        items = answer.json()
    except ValueError:
        return _all(inputs, Fault.MALFORMED, "the answer is not JSON")
    if not isinstance(items, list) or len(items) != len(inputs):
        return _all(inputs, Fault.MALFORMED, f"expected a list of {len(inputs)} samples")
    marks = {mark for item in items for mark in _marks(item, wanted)} if engine.adapter is None else set()
    reading = Reading(wanted, engine, await prove(engine, marks, timeout_s) if marks else {})
    return [_checked(item, reading, int(p["max_new_tokens"])) for item, p in zip(items, parameters, strict=True)]


@dataclass(frozen=True, slots=True)
class Reading:
    """How the labels of one engine's answer are read."""

    wanted: Wanted
    engine: Engine
    proven: Mapping[str, int]

    def version(self, label: str) -> int | None:
        """The version of tokens under a label, if it is wanted. Where an adapter was named, the label says that its base was
        there, and the version is the one that was named, whatever the engine serves by now."""
        adapter = self.engine.adapter
        if adapter is None:
            version = self.proven.get(label, labels.proven_version(label))
        else:
            version = adapter.version if label == adapter.label else None
        return version if self.wanted.accepts(version) else None


def _marks(item: Any, wanted: Wanted) -> set[str]:
    """Labels that may turn out to be a version that is wanted."""
    try:
        meta = item["meta_info"]
        found = {str(span["version"]) for span in meta.get("weight_versions") or []} | {str(meta["weight_version"])}
    except (AttributeError, KeyError, TypeError):
        return set()  # refused below
    return {label for label in found if wanted.accepts(labels.loaded_version(label))}


def _is_about_adapter(answer: httpx.Response, engine: Engine) -> bool:
    """Whether a refusal says that the adapter is not there: the engine that had it may just have been started anew."""
    return engine.adapter is not None and "lora" in _message(answer).lower()


def _all(inputs: Sequence[Sequence[int]], fault: Fault, detail: str) -> list[Completion | Refusal]:
    return [Refusal(fault, detail)] * len(inputs)


def _message(answer: httpx.Response) -> str:
    try:
        body = answer.json()
        error = body.get("error", body) if isinstance(body, dict) else body
        text = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        text = answer.text
    return " ".join(str(text).split())[:300]


def _checked(item: Any, reading: Reading, max_new_tokens: int) -> Completion | Refusal:
    try:
        return _parse(item, reading, max_new_tokens)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as e:
        return Refusal(Fault.MALFORMED, f"unexpected answer ({type(e).__name__}: {e})")


def _parse(item: Any, reading: Reading, max_new_tokens: int) -> Completion | Refusal:
    finish = item["meta_info"]["finish_reason"]
    kind = str(finish["type"])
    if kind == "abort":
        return _aborted(item, reading, max_new_tokens, f"aborted: {finish.get('message', '')}")
    piece = _piece(item, reading, max_new_tokens)
    if isinstance(piece, Refusal):
        return piece
    if kind not in ("stop", "length"):
        return Refusal(Fault.MALFORMED, f"unknown finish_reason '{kind}'")
    matched = finish.get("matched")
    return Completion(
        token_ids=piece.token_ids,
        logprobs=piece.logprobs,
        versions=piece.versions,
        cached_tokens=piece.cached_tokens,
        finish_reason=kind,
        stop_text=matched if isinstance(matched, str) else None,
    )


def _aborted(item: Any, reading: Reading, max_new_tokens: int, detail: str) -> Refusal:
    """An abort, with what was drawn before it where that can be believed."""
    try:
        piece = _piece(item, reading, max_new_tokens)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
        piece = None
    return Refusal(Fault.ABORTED, detail, piece if isinstance(piece, Piece) else None)


def _piece(item: Any, reading: Reading, max_new_tokens: int) -> Piece | Refusal:
    """The checks of tokens, whatever ended them."""
    meta = item["meta_info"]
    ids = [int(i) for i in item["output_ids"]]
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(ids)}]
    bounds = [(int(span["start"]), int(span["end"])) for span in spans]
    if bounds[0][0] != 0 or bounds[-1][1] != len(ids) or any(a[1] != b[0] for a, b in itertools.pairwise(bounds)):
        return Refusal(Fault.MALFORMED, f"weight_versions {bounds} do not cover {len(ids)} tokens")
    versions: list[VersionSpan] = []
    for label, (start, end) in zip([str(span["version"]) for span in spans], bounds, strict=True):
        version = reading.version(label)
        if version is None:
            return Refusal(Fault.WRONG_VERSION, f"expected {reading.wanted}, found {label}")
        versions.append(VersionSpan(version, start, end))
    if reading.version(last := str(meta["weight_version"])) is None:
        return Refusal(Fault.WRONG_VERSION, f"expected {reading.wanted}, found {last}")
    if not 1 <= len(ids) <= max_new_tokens:
        return Refusal(Fault.MALFORMED, f"{len(ids)} output tokens, expected 1 to {max_new_tokens}")
    entries = meta["output_token_logprobs"]
    if [int(entry[1]) for entry in entries] != ids:
        return Refusal(Fault.MALFORMED, "output_token_logprobs are of other tokens than output_ids")
    logprobs = tuple(float(np.float32(entry[0])) for entry in entries)
    if not all(math.isfinite(p) and p <= LOGPROB_SLACK for p in logprobs):
        return Refusal(Fault.MALFORMED, "a log-probability is not finite or above 0")
    return Piece(
        token_ids=tuple(ids),
        logprobs=logprobs,
        versions=joined(versions),
        cached_tokens=int(meta.get("cached_tokens") or 0),
    )
