"""One token further: draws the next token of running rows, records it, and decides which rows are done."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from colchis.components.engine.sample import Rows, Sample
from colchis.components.engine.sampling import draw, filter_probs, uniforms

Reason = dict[str, Any]
StopString = Callable[[Sample, list[int]], str | None]


@dataclass(frozen=True)
class Piece:
    """Output so far of a streamed sample."""

    sample: Sample
    output_ids: list[int]
    logprobs: list[float]


def abort_reason(message: str, status_code: int | None = None) -> Reason:
    return {"type": "abort", "message": message, "status_code": status_code, "err_type": None}


def advance(
    rows: Rows, part: slice, logits: torch.Tensor, stop_string: StopString
) -> tuple[dict[int, Reason], list[Piece]]:
    """Draws one token for each row in `part` from its float32 logits [rows, V].

    Returns why rows ended, by row, and the stream pieces of those that go on. Log-probs are those of the
    temperature-scaled distribution before top_k, top_p and min_p, as SGLang's.
    """
    produced = rows.produced[part].copy()
    _forbid_stops(rows, part, logits)
    scaled = logits if (rows.temperature[part] == 1).all() else logits / rows.torch_temperature[part]
    logprobs = scaled.log_softmax(-1)
    probs = logprobs.exp()
    if rows.filtered[part].any():
        # A neutral value where a row asked for no filter, so that its draw doesn't depend on those that did.
        active = rows.filtered[part]
        probs = filter_probs(
            probs,
            torch.from_numpy(np.where(active, rows.top_k[part], probs.shape[-1])),
            torch.from_numpy(np.where(active, rows.top_p[part], np.float32(1))),
            torch.from_numpy(np.where(active, rows.min_p[part], np.float32(0))),
        )
    ids = draw(probs, torch.from_numpy(uniforms(rows.seed[part], produced)))
    if rows.greedy[part].any():
        ids = torch.where(torch.from_numpy(rows.greedy[part]), scaled.argmax(-1), ids)
    chosen = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1).numpy()
    sound = np.isfinite(chosen)
    drawn = ids.numpy()
    index = np.arange(part.start, part.stop)
    replaying = produced < rows.replay[part]
    if replaying.any():
        # Tokens from before a retraction: fed again to rebuild keys and values, neither drawn nor counted anew.
        drawn = np.where(replaying, rows.output_ids[index, produced], drawn)
        chosen = np.where(replaying, rows.logprobs[index, produced], chosen)
    rows.output_ids[index, produced] = drawn
    rows.logprobs[index, produced] = chosen
    rows.token[part] = drawn
    rows.position[part] += 1
    rows.produced[part] += 1
    stopped = (drawn[:, None] == rows.stop_ids[part]).any(1) & (rows.produced[part] >= rows.min_new[part])
    done = stopped | (rows.produced[part] >= rows.max_new[part]) | ~sound
    if (produced == 0).any():
        now = time.perf_counter()
        for offset in np.flatnonzero(produced == 0).tolist():
            sample = rows.samples[part.start + offset]
            sample.first_token_s = sample.first_token_s or now
    reasons: dict[int, Reason] = {}
    for offset in np.flatnonzero(done).tolist():
        row = part.start + offset
        if not sound[offset]:
            reasons[row] = abort_reason("the model produced a non-finite log-prob: its weights overflow", 500)
        elif stopped[offset]:
            reasons[row] = {"type": "stop", "matched": int(drawn[offset])}
        else:
            reasons[row] = {"type": "length", "length": int(rows.produced[row])}
    pieces: list[Piece] = []
    for offset in np.flatnonzero(rows.watched[part] & ~replaying).tolist():
        row = part.start + offset
        piece = _watch(rows, row, logprobs[offset], reasons, stop_string)
        if piece is not None:
            pieces.append(piece)
    return reasons, pieces


def _forbid_stops(rows: Rows, part: slice, logits: torch.Tensor) -> None:
    """Before min_new_tokens the ids that would end a sample have probability 0, as in SGLang."""
    for offset in np.flatnonzero(rows.produced[part] < rows.min_new[part]).tolist():
        logits[offset, list(rows.samples[part.start + offset].stop_ids)] = -torch.inf


def _watch(
    rows: Rows, row: int, logprobs: torch.Tensor, reasons: dict[int, Reason], stop_string: StopString
) -> Piece | None:
    """The per-token work of a row that asked for some: extra log-probs, stop strings, a stream piece."""
    sample, produced = rows.samples[row], int(rows.produced[row])
    ids: list[int] = rows.output_ids[row, :produced].tolist()
    if sample.top_logprobs or sample.token_ids_logprob:
        top, asked = extra_logprobs(logprobs, sample)
        sample.output_top.append(top)
        sample.output_chosen.append(asked)
    if sample.params.stop and produced >= sample.params.min_new_tokens:
        matched = stop_string(sample, ids)
        if matched is not None and reasons.get(row, {"type": "length"})["type"] == "length":
            reasons[row] = {"type": "stop", "matched": matched}
    if sample.streamed and row not in reasons:
        return Piece(sample, ids, rows.logprobs[row, :produced].tolist())
    return None


def extra_logprobs(logprobs: torch.Tensor, sample: Sample) -> tuple[list[tuple[float, int]], list[float]]:
    """The top log-probs and those of the asked ids, of one position's log-probs [V]."""
    top: list[tuple[float, int]] = []
    if sample.top_logprobs:
        values, ids = logprobs.topk(min(sample.top_logprobs, logprobs.shape[0]))
        top = list(zip(values.tolist(), ids.tolist(), strict=True))
    asked: list[float] = logprobs[sample.token_ids_logprob].tolist() if sample.token_ids_logprob else []
    return top, asked
