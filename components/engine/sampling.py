"""Sampling parameters of a request, and the draw: one uniform number per (seed, position), inverted over the cumsum.

A sample's draws depend on its own logits, seed and position only, so batch companions cannot change them.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field

GREEDY_TEMPERATURE = 1e-6
"""At or below: the most likely token, log-probs at temperature 1 (as SGLang)."""


class SamplingParams(BaseModel):
    """SGLang's sampling fields that the embedded engine obeys; anything else is refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_new_tokens: Annotated[int, Field(ge=0)] = 128
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=4096)] = 1
    sampling_seed: int | list[int] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] = 0.0
    presence_penalty: Annotated[float, Field(ge=0, le=0)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=1, le=1)] = 1.0

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def filtered(self) -> bool:
        """Whether top_k, top_p or min_p cut the distribution."""
        return self.top_p < 1 or self.top_k > 1 or self.min_p > 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if not self.stop:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def mix_seed(seed: int, index: int) -> int:
    """Seed of the index-th sample of a request that gives one seed for n samples; index 0 keeps the seed."""
    if index == 0:
        return seed & 0xFFFFFFFFFFFFFFFF
    return int(_mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64), np.array([index], np.uint64))[0])


def _mix(seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea, Flood 2014) of the seed's own hash plus the counter."""
    x = seeds
    for step in (np.uint64(1), counters + np.uint64(1)):
        x = x + np.uint64(0x9E3779B97F4A7C15) * step
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return x


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """One number of [0, 1) per row, a multiple of 2^-24, from the seed and the index of the token to draw."""
    bits = _mix(seeds, positions.astype(np.uint64)) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32(2.0**-24)


def filter_probs(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Zeroes what top_k, top_p (smallest set reaching p) and min_p (relative to the maximum) cut; not renormalised.

    probs: float32 [n, V]; top_k: int64 [n] (V or more: off); top_p, min_p: float32 [n]. Rows with neutral settings
    come back bit for bit.
    """
    ordered, index = probs.sort(stable=True, dim=-1, descending=True)
    rank = torch.arange(probs.shape[-1])
    before = ordered.cumsum(-1) - ordered
    cut = (rank >= top_k.unsqueeze(1)) | ((before >= top_p.unsqueeze(1)) & (top_p < 1).unsqueeze(1))
    cut |= ordered < ordered[:, :1] * min_p.unsqueeze(1)
    return probs.masked_fill(torch.zeros_like(cut).scatter_(1, index, cut), 0.0)


def draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Token ids int64 [n]: the first id whose cumulative probability exceeds uniform * total.

    A token of probability 0 is never drawn: `right=True` skips flat stretches, and uniform * total < total in float32.
    """
    cumulative = probs.cumsum(-1)
    target = uniform.unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=probs.shape[-1] - 1)
