"""Micro-batches: the plan of a batch as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor, nn

from colchis.components.errors import BadData
from colchis.components.records.batch import Batch, TrainingSample
from colchis.components.trainer.losses import token_logprobs


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples packed one after the other, without padding. T tokens in all, N of them trained."""

    ids: tuple[str, ...]
    """Of the samples; empty for a pass that only keeps step with the other ranks."""
    token_ids: Tensor
    """int64 [1, T]"""
    position_ids: Tensor
    """int64 [1, T], from 0 in each document"""
    doc_ends: tuple[int, ...]
    """Cumulative ends of the documents"""
    rows: Tensor
    """int64 [N]: where the logits stand that predict the trained tokens"""
    targets: Tensor
    """int64 [N]: the trained tokens"""
    sample: Tensor
    """int64 [N]: index into `ids`"""
    sequence_tokens: Tensor
    """float32 [N]: trained tokens of the token's sequence"""
    advantages: Tensor
    """float32 [N]"""
    behaviour: Tensor
    """float32 [N]: log-probabilities that the engine reported"""
    old: Tensor | None = None
    """float32 [N]: the trainer's log-probabilities before the first step; None when there is only one step"""
    reference: Tensor | None = None
    """float32 [N]: log-probabilities of the frozen reference"""

    @property
    def tokens(self) -> int:
        return self.targets.numel()

    @property
    def sequences(self) -> int:
        """Samples with a trained token, counted from what will be trained."""
        return len(set(self.sample.tolist()))

    def place_of(self, index: int) -> str:
        """Names trained token `index` of this micro-batch for an error message."""
        number = int(self.sample[index])
        start = self.doc_ends[number - 1] if number else 0
        return f"sample '{self.ids[number]}', token {int(self.rows[index]) + 1 - start}"


def pack(samples: Sequence[TrainingSample], *, vocabulary: int) -> MicroBatch:
    """BadData names a sample with a token id outside the vocabulary."""
    lengths = torch.tensor([len(s.token_ids) for s in samples])
    ends = lengths.cumsum(0)
    token_ids = torch.tensor([token for s in samples for token in s.token_ids], dtype=torch.int64)
    mask = torch.tensor([trained for s in samples for trained in s.loss_mask], dtype=torch.bool)
    behaviour = torch.tensor([p for s in samples for p in s.logprobs], dtype=torch.float32)
    document = torch.repeat_interleave(torch.arange(len(samples)), lengths)  # [T]
    if token_ids.numel() and int(token_ids.max()) >= vocabulary:
        at = int(document[token_ids >= vocabulary][0])
        raise BadData(
            f"training sample '{samples[at].id}' holds token {max(samples[at].token_ids)}, the model has {vocabulary}",
            hint="rollout used another tokenizer than the model's",
        )
    trained = mask.nonzero().squeeze(-1)  # [N]
    owner = document[trained]
    per_sample = torch.bincount(owner, minlength=len(samples))
    return MicroBatch(
        ids=tuple(s.id for s in samples),
        token_ids=token_ids[None],
        position_ids=(torch.arange(len(token_ids)) - (ends - lengths)[document])[None],
        doc_ends=tuple(ends.tolist()),
        rows=trained - 1,
        targets=token_ids[trained],
        sample=owner,
        sequence_tokens=per_sample[owner].float(),
        advantages=torch.tensor([s.advantage for s in samples], dtype=torch.float64).float()[owner],
        behaviour=behaviour[trained],
    )


def idle() -> MicroBatch:
    """One token, none trained: a rank without samples still takes part in every gather and reduction."""
    none, zero = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    one = torch.zeros(1, 1, dtype=torch.int64)
    return MicroBatch((), one, one, (1,), zero, zero, zero, none, none, none)


def micro_batches_of(batch: Batch, *, step: int, rank: int, vocabulary: int) -> list[MicroBatch]:
    """What `rank` trains in `step`, padded with idle passes to the number that every rank runs."""
    mine = [s for s in batch.samples if s.step == step and s.rank == rank]
    packed = [pack(list(part), vocabulary=vocabulary) for _, part in groupby(mine, key=lambda s: s.micro_batch)]
    planned = next(d.micro_batches for d in batch.denominators.steps if d.step == step)
    if len(packed) > planned:
        raise BadData(f"step {step}: rank {rank} was given {len(packed)} micro-batches, planned are {planned}")
    return packed + [idle()] * (planned - len(packed))


def forward(model: nn.Module, micro_batch: MicroBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities float32 [N] and entropies float32 [N] of the trained tokens."""
    output = model(
        input_ids=micro_batch.token_ids,
        position_ids=micro_batch.position_ids,
        use_cache=False,
        doc_ends=micro_batch.doc_ends,
        logits_to_keep=micro_batch.rows,
    )
    return token_logprobs(output.logits[0], micro_batch.targets, temperature)


def with_old(model: nn.Module, micro_batches: Sequence[MicroBatch], *, temperature: float) -> list[MicroBatch]:
    """Each with the model's present log-probabilities as `old`."""
    with torch.no_grad():
        return [replace(mb, old=forward(model, mb, temperature=temperature)[0]) for mb in micro_batches]


def with_reference(model: nn.Module, micro_batches: Sequence[MicroBatch], *, temperature: float) -> list[MicroBatch]:
    """Each with the log-probabilities of the reference `model`."""
    with torch.no_grad():
        return [replace(mb, reference=forward(model, mb, temperature=temperature)[0]) for mb in micro_batches]
