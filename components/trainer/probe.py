"""Log-probabilities of fixed tokens: what a reload compares an engine with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from colchis.components.errors import BadData
from colchis.components.records.batch import Batch
from colchis.components.store import Record
from colchis.components.trainer.losses import token_logprobs
from colchis.components.trainer.model import load_model

SEQUENCES, TOKENS = 2, 32
"""How many sequences a probe has, and how long each may be."""


class Probe(Record):
    """`logprobs[k][j]` belongs to token j + 1 of sequence k, at temperature 1; the first token has none."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]


def logprobs_of(model_folder: Path, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probabilities of each sequence's tokens but the first, under the weights in `model_folder`, in their type."""
    return sequence_logprobs(load_model(model_folder, dtype=None), token_ids)


def sequence_logprobs(model: nn.Module, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
    """As `logprobs_of`, for a model that is loaded. A collective when it is sharded."""
    short = next((k for k, tokens in enumerate(token_ids) if len(tokens) < 2), None)
    if short is not None:
        raise BadData(f"probe sequence {short} has {len(token_ids[short])} tokens; 2 or more give a log-probability")
    results: list[list[float]] = []
    with torch.no_grad():
        for tokens in token_ids:
            ids: Tensor = torch.tensor([list(tokens)])  # [1, T]
            positions = torch.arange(ids.shape[1])[None]
            output = model(input_ids=ids, position_ids=positions, use_cache=False, doc_ends=(ids.shape[1],))
            logprobs, _ = token_logprobs(output.logits[0, :-1], ids[0, 1:], temperature=1.0)
            results.append(logprobs.tolist())
    return results


def probe_tokens(batch: Batch, *, vocabulary: int) -> list[list[int]]:
    """Beginnings of the first samples by id; of an empty batch, the first words of the vocabulary."""
    chosen = sorted(batch.samples, key=lambda s: s.id)[:SEQUENCES]
    sequences = [s.token_ids[:TOKENS] for s in chosen]
    return sequences or [list(range(min(vocabulary, TOKENS)))]
