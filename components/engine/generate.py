"""/generate: from a JSON body to samples, and from finished samples to SGLang's answer."""

from __future__ import annotations

import itertools
import json
import secrets
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from colchis.components.engine.architecture import Architecture
from colchis.components.engine.sample import Sample
from colchis.components.engine.sampling import SamplingParams, mix_seed
from colchis.components.engine.settings import EngineSettings
from colchis.components.engine.text import Text
from colchis.components.errors import BadData

DETERMINISTIC_SEED = 42
"""Seed of a request without one in deterministic mode, as SGLang's."""


_PROCESS = secrets.token_hex(8)
_numbers = itertools.count()


def _new_id() -> str:
    """A request id, unique over processes; drawn from a counter because a system call per request costs a GIL switch."""
    return f"{_PROCESS}{next(_numbers):08x}"


class GenerateBody(BaseModel):
    """The request fields. Those below the line are SGLang's that change nothing here; unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: list[int] | list[list[int]] | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None

    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    log_metrics: bool = True
    no_logs: bool = False
    priority: int | None = None
    custom_labels: dict[str, str] | None = None


@dataclass(frozen=True)
class Generation:
    """A request in samples; `single`: the answer is one object, not a list."""

    samples: list[Sample]
    single: bool
    stream: bool
    with_logprobs: bool
    prompt_token_ids: bool
    text_in_logprobs: bool


def explain(error: ValidationError) -> str:
    """One line that names each wrong field and what it got."""
    return "; ".join(
        f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']} (got {json.dumps(item.get('input'), default=str)[:80]})"
        for item in error.errors()
    )


def _per_item(value: Any, count: int, name: str) -> list[Any]:
    """A field given once or once per item, as one value per item."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise BadData(f"{name} has {len(value)} entries for {count} prompts")
    return value


def parse_generate(
    raw: bytes, settings: EngineSettings, architecture: Architecture, eos: frozenset[int], text: Text
) -> Generation:
    """Checks a body completely; BadData (HTTP 400) says which field is wrong."""
    try:
        body = GenerateBody.model_validate_json(raw)
        prompts, single = _prompts(body, text)
        count = len(prompts)
        given = body.sampling_params or {}
        params = [SamplingParams.model_validate(item) for item in (given if isinstance(given, list) else [given])]
    except ValidationError as error:
        raise BadData(explain(error)) from error
    per_item = params * count if len(params) == 1 else _per_item(params, count, "sampling_params")
    with_logprobs = body.return_logprob if isinstance(body.return_logprob, bool) else any(body.return_logprob)
    starts = _per_item(body.logprob_start_len, count, "logprob_start_len")
    tops = _per_item(body.top_logprobs_num, count, "top_logprobs_num")
    chosen: list[Any] = body.token_ids_logprob or []
    namespaces = list(
        zip(
            _per_item(body.extra_key or "", count, "extra_key"),
            _per_item(body.cache_salt or "", count, "cache_salt"),
            strict=True,
        )
    )
    nested = bool(chosen) and isinstance(chosen[0], list)
    chosen_per_item = _per_item(chosen, count, "token_ids_logprob") if nested else [chosen] * count
    rids = body.rid if isinstance(body.rid, list) else [body.rid or _new_id()]
    if len(rids) == 1 and count > 1:
        rids = [f"{rids[0]}_{index}" for index in range(count)]
    samples: list[Sample] = []
    for index, prompt in enumerate(prompts):
        _check_prompt(prompt, per_item[index], settings, architecture)
        stop_ids = frozenset(per_item[index].stop_token_ids or ()) | (
            frozenset() if per_item[index].ignore_eos else eos
        )
        outside = [token for token in (*stop_ids, *chosen_per_item[index]) if not 0 <= token < architecture.vocab]
        if outside and (per_item[index].min_new_tokens or chosen_per_item[index]):
            raise BadData(f"token id {outside[0]} is outside the vocabulary of {architecture.vocab}")
        for number, seed in enumerate(_seeds(per_item[index], deterministic=settings.deterministic)):
            samples.append(
                Sample(
                    id=rids[index] if per_item[index].n == 1 else f"{rids[index]}_{number}",
                    prompt=prompt,
                    params=per_item[index],
                    seed=seed,
                    stop_ids=stop_ids,
                    logprob_start=min(starts[index], len(prompt) - 1) if with_logprobs else -1,
                    top_logprobs=tops[index] if with_logprobs else 0,
                    token_ids_logprob=chosen_per_item[index] if with_logprobs else [],
                    streamed=body.stream,
                    namespace=namespaces[index],
                )
            )
    return Generation(
        samples,
        single and len(samples) == 1,
        body.stream,
        with_logprobs,
        body.return_prompt_token_ids,
        body.return_text_in_logprobs,
    )


def _prompts(body: GenerateBody, text: Text) -> tuple[list[list[int]], bool]:
    """The prompts as ids, and whether the request gave one prompt rather than a list."""
    if (body.text is None) == (body.input_ids is None):
        raise BadData("give exactly one of text and input_ids")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        prompts, single = [text.encode(item) for item in texts], isinstance(body.text, str)
    else:
        ids: Any = body.input_ids
        single = not ids or isinstance(ids[0], int)
        prompts = [ids] if single else ids
    if not prompts or not all(prompts):
        raise BadData("input_ids (or text) is empty")
    return prompts, single


def _check_prompt(
    prompt: list[int], params: SamplingParams, settings: EngineSettings, architecture: Architecture
) -> None:
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= architecture.vocab:
        raise BadData(
            f"input id {low if low < 0 else high} is outside the vocabulary of {architecture.vocab}",
            hint="check that tokenizer and model belong together",
        )
    context = min(settings.context_length or architecture.context_tokens, architecture.context_tokens)
    needed = len(prompt) + params.max_new_tokens
    for limit, name in ((context, "the context of"), (settings.max_total_tokens, "the cache budget of")):
        if needed > limit:
            raise BadData(
                f"{len(prompt)} prompt tokens + max_new_tokens {params.max_new_tokens} exceed {name} {limit} tokens",
                hint="shorten the prompt or lower max_new_tokens",
            )


def _seeds(params: SamplingParams, *, deterministic: bool) -> list[int]:
    """One 64-bit seed per sample. A list is taken as given; one seed for n samples is mixed with the sample's number."""
    seed = params.sampling_seed
    if isinstance(seed, list):
        if len(seed) != params.n:
            raise BadData(f"sampling_seed has {len(seed)} entries for n = {params.n}")
        return [value & 0xFFFFFFFFFFFFFFFF for value in seed]
    if seed is None:
        if not deterministic:
            return [secrets.randbits(64) for _ in range(params.n)]
        seed = DETERMINISTIC_SEED
    return [mix_seed(seed, index) for index in range(params.n)]


def _entry(logprob: float | None, token: int, text: Text, with_text: bool) -> list[Any]:
    return [logprob, token, text.decode([token], skip_special=False) if with_text else None]


def answer(
    generation: Generation,
    sample: Sample,
    text: Text,
    weight_version: str,
    piece: tuple[list[int], list[float]] | None = None,
) -> dict[str, Any]:
    """SGLang's answer for one sample: finished, or (with `piece`) what a stream has so far."""
    ids, logprobs = piece or (sample.output_ids, sample.logprobs)
    with_text = generation.text_in_logprobs
    meta: dict[str, Any] = {
        "id": sample.id,
        "finish_reason": sample.finish_reason if piece is None else None,
        "prompt_tokens": len(sample.prompt),
        "completion_tokens": len(ids),
        "cached_tokens": sample.cached_tokens,
        "weight_version": sample.spans[-1].version if sample.spans else weight_version,
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end if piece is None else len(ids)}
            for span in sample.spans
        ],
        "num_retractions": sample.retractions,
    }
    if generation.with_logprobs:
        meta |= _logprob_fields(sample, ids, logprobs, text, with_text)
    if generation.prompt_token_ids:
        meta["prompt_token_ids"] = sample.prompt
    if piece is None and sample.finished_s is not None:
        meta["e2e_latency"] = sample.finished_s - sample.created_s
    return {"text": text.output(sample, ids), "output_ids": ids, "meta_info": meta}


def _logprob_fields(
    sample: Sample, ids: list[int], logprobs: list[float], text: Text, with_text: bool
) -> dict[str, Any]:
    """The log-prob fields; each entry is [log-prob, token id, text or null], the prompt's first one without a value."""
    start = sample.logprob_start
    inputs: list[list[Any]] = []
    if start >= 0 and sample.admitted:
        inputs = [
            _entry(logprob, token, text, with_text)
            for logprob, token in zip([None, *sample.input_logprobs], sample.prompt[start:], strict=True)
        ]
    fields: dict[str, Any] = {
        "input_token_logprobs": inputs,
        "output_token_logprobs": [
            _entry(logprob, token, text, with_text) for logprob, token in zip(logprobs, ids, strict=True)
        ],
        "output_token_logprobs_length": len(ids),
    }
    if sample.top_logprobs:
        for name, rows in (("input", sample.input_top), ("output", sample.output_top)):
            listed = [[_entry(value, token, text, with_text) for value, token in row] for row in rows]
            fields[f"{name}_top_logprobs"] = [None, *listed] if name == "input" and inputs else listed
    if sample.token_ids_logprob:
        for name, chosen in (("input", sample.input_chosen), ("output", sample.output_chosen)):
            asked = [
                [
                    _entry(value, token, text, with_text)
                    for value, token in zip(row, sample.token_ids_logprob, strict=True)
                ]
                for row in chosen
            ]
            fields[f"{name}_token_ids_logprobs"] = [None, *asked] if name == "input" and inputs else asked
    return fields
