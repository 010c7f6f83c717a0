"""How tokens are drawn: the parameters of a request, and a seed for every sample."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from colchis.components.config import RolloutConfig


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters shared by all samples of a rollout."""

    samples: int
    """Samples per prompt."""
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]

    @classmethod
    def of(cls, config: RolloutConfig) -> Sampling:
        return cls(
            samples=config.group_size,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k or -1,
            stop=tuple(config.stop),
        )

    @classmethod
    def greedy(cls, config: RolloutConfig) -> Sampling:
        """One sample per prompt, always the likeliest token: for evaluation."""
        return cls(
            samples=1,
            max_new_tokens=config.max_new_tokens,
            temperature=0.0,
            top_p=1.0,
            top_k=-1,
            stop=tuple(config.stop),
        )

    def parameters(self, seed: int, *, drawn: int = 0) -> dict[str, Any]:
        """SGLang's `sampling_params` of one sample, of which `drawn` tokens are there already."""
        parameters: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens - drawn,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "sampling_seed": seed,
        }
        return parameters | ({"stop": list(self.stop)} if self.stop else {})

    def digest(self) -> str:
        """sha256 of the canonical JSON, recorded with every trajectory."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sampling_seed(seed: int, iteration: int, prompt_index: int, sample: int, turn: int = 0, *, drawn: int = 0) -> int:
    """Seed of one sample's draws in [0, 2^31): a function of names alone, so that a repeated shard, another number of
    shards or another engine draws the same. Later turns, and what follows `drawn` tokens of an aborted one, get seeds of
    their own, else an engine that counts its draws from the start of a request would repeat earlier ones."""
    name = f"{seed}/{iteration}/{prompt_index}/{sample}" + (f"/{turn}" if turn or drawn else "")
    name += f"+{drawn}" if drawn else ""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 2**31
