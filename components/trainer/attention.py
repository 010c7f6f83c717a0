"""Attention over packed documents: block-diagonal and causal, one SDPA call per run of equally long documents.

Document boundaries travel as an explicit argument, `doc_ends`. transformers can also guess them from resets of the
position ids, but only without an attention mask and without a cache object; otherwise documents see each other and
nothing warns. Here a forward pass without `doc_ends` fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from colchis.components.errors import BadConfig

IMPLEMENTATION = "colchis_packed"
"""`attn_implementation` of every model that the trainer loads."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    doc_ends: Sequence[int] | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, D], key and value [1, kv_heads, T, D] -> [1, T, heads, D].

    `doc_ends`: cumulative ends of the documents, the last one is T. BadConfig when it is missing or does not cover T,
    and for attention with soft caps, sinks or a window shorter than a document, which this function does not compute.
    """
    if not doc_ends or doc_ends[-1] != query.shape[2] or query.shape[0] != 1:
        raise BadConfig(f"packed attention needs doc_ends that end at {query.shape[2]} tokens, found {doc_ends}")
    for name, given in (("softcap", softcap), ("s_aux", s_aux)):
        if given is not None:
            raise BadConfig(f"the trainer's attention does not support '{name}', which this model family uses")
    runs = list(document_runs(doc_ends))
    longest = max(length for _, length in runs)
    if sliding_window is not None and longest > sliding_window:
        raise BadConfig(f"a document of {longest} tokens exceeds the model's sliding window of {sliding_window}")
    sizes = [count * length for count, length in runs]
    outputs = []
    for (count, length), *parts in zip(
        runs, *(x.squeeze(0).split_with_sizes(sizes, dim=1) for x in (query, key, value)), strict=True
    ):
        q, k, v = (_documents(x, count, length) for x in parts)  # [count, heads, length, D]
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [count * length, heads, D]
    return torch.cat(outputs).unsqueeze(0), None


def document_runs(doc_ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(count, length) of each run of neighbouring documents with equal length."""
    lengths = (end - start for start, end in pairwise((0, *doc_ends)))
    return ((len(list(run)), length) for length, run in groupby(lengths))


def _documents(x: Tensor, count: int, length: int) -> Tensor:
    """[heads, count * length, D] -> [count, heads, length, D], a view."""
    return x.view(x.shape[0], count, length, x.shape[2]).transpose(0, 1)


def _no_mask(*_: Any, **__: Any) -> None:
    """transformers asks for a mask tensor; `doc_ends` replaces it."""


AttentionInterface.register(IMPLEMENTATION, packed_attention)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
