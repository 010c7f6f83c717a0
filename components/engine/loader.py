"""From a model directory to something that can serve, built completely beside what serves now."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from colchis.components.engine.architecture import Architecture
from colchis.components.engine.checkpoint import read_checkpoint
from colchis.components.engine.decoder import Decoder, StaticDecoder
from colchis.components.engine.fallback import TransformersDecoder, load_transformers
from colchis.components.engine.invariance import find_quantum, find_windows
from colchis.components.engine.settings import EngineSettings
from colchis.components.engine.text import Text
from colchis.components.engine.weights import Assembly, StaticWeights


@dataclass(frozen=True)
class Serving:
    """The model that serves, and what belongs to it. `decoder` outlives updates; `swap` puts this model's weights in."""

    folder: Path
    config: dict[str, Any]
    architecture: Architecture
    dtype: torch.dtype
    """Of weights and cache; later weights are cast to it."""
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer | None
    decoder: Decoder
    swap: Callable[[], None]
    checksums: dict[str, Future[str]] | None
    """Of the tensors as they were loaded; None where they are hashed only when somebody asks."""


def load(folder: Path, settings: EngineSettings, current: Serving | None, text: Text) -> Serving:
    """Reads and checks `folder`. Nothing of `current` changes until the scheduler installs the result.

    Raises BadData for every kind of bad checkpoint (checkpoint.py), including another architecture than `current`'s.
    """
    fixed: torch.dtype | None = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    dtype = current.dtype if current else fixed
    checkpoint = read_checkpoint(
        folder, dtype, current.architecture if current else None, current.config if current else None
    )
    tokenizer = text.load(folder)
    if tokenizer is None and current is not None:
        tokenizer = current.tokenizer
    decoder: Decoder
    swap: Callable[[], None]
    checksums: dict[str, Future[str]] | None = None
    if checkpoint.assembly is not None:
        weights, checksums = checkpoint.assembly.weights(), checkpoint.assembly.checksums
        if current is not None and isinstance(current.decoder, StaticDecoder):
            decoder = current.decoder
        else:
            decoder = _static_decoder(weights, settings)
        swap = _swap(decoder, weights)
    else:
        model = load_transformers(checkpoint)
        if current is not None and isinstance(current.decoder, TransformersDecoder):
            decoder = current.decoder
        else:
            decoder = TransformersDecoder(model, checkpoint.architecture)
        served_model = decoder

        def swap_model() -> None:
            served_model.model = model

        swap = swap_model

    return Serving(
        folder,
        checkpoint.config,
        checkpoint.architecture,
        checkpoint.dtype,
        checkpoint.eos_token_ids,
        tokenizer,
        decoder,
        swap,
        checksums,
    )


def received(assembly: Assembly, current: Serving) -> Serving:
    """`current` with other weights, which came without a folder. The assembly is complete."""
    assert isinstance(current.decoder, StaticDecoder)
    return replace(current, swap=_swap(current.decoder, assembly.weights()), checksums=assembly.checksums)


def _swap(decoder: StaticDecoder, weights: StaticWeights) -> Callable[[], None]:
    def swap() -> None:
        decoder.weights = weights

    return swap


def _static_decoder(weights: StaticWeights, settings: EngineSettings) -> StaticDecoder:
    if not settings.deterministic:
        return StaticDecoder(weights)
    windows = find_windows(weights.architecture, weights.embed.dtype)
    return StaticDecoder(weights, find_quantum(weights), windows)
