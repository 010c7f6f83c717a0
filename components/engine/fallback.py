"""Models that the static loop doesn't know: transformers' own forward with its own cache, one row at a time.

Slow, but complete: seeds, log-probs, versions, retraction and streaming work as for the static families, and a row
cannot depend on its companions because it has none.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from colchis.components.engine.architecture import Architecture
from colchis.components.engine.checkpoint import Checkpoint, read_tensors
from colchis.components.engine.decoder import Prefix
from colchis.components.errors import BadData


def load_transformers(checkpoint: Checkpoint) -> Any:
    """A fresh transformers model with the directory's weights, checked as strictly as those of the static families."""
    import transformers  # takes seconds, and only unknown families need it

    causal_model: Any = transformers.AutoModelForCausalLM
    fields = {key: value for key, value in checkpoint.config.items() if key != "transformers_version"}
    try:
        config = transformers.AutoConfig.for_model(**fields)
        model = causal_model.from_config(config, dtype=checkpoint.dtype)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadData(
            f"transformers cannot build a causal model of type {checkpoint.architecture.model_type}: {error}",
            where=str(checkpoint.folder),
        ) from error
    # One name per storage: transformers saves a tied tensor once, under the first of its names.
    kept: dict[int, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        if kept.setdefault(tensor.data_ptr(), name) == name:
            shapes[name] = tuple(tensor.shape)
    tensors = read_tensors(checkpoint.folder, shapes, checkpoint.dtype, tied=False)
    model.load_state_dict(tensors, strict=False)
    return model.eval()


class TransformersDecoder:
    """The `Decoder` protocol over a transformers model; a row's cache is a transformers cache object."""

    def __init__(self, model: Any, architecture: Architecture) -> None:
        self.model = model
        self.architecture = architecture
        self._caches: dict[int, Any] = {}

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        named: Iterable[tuple[str, torch.Tensor]] = self.model.named_parameters()
        return named

    def reset(self) -> None:
        self._caches.clear()

    def reserve(self, rows: int, tokens: int) -> None:
        """Nothing to reserve: the caches grow by themselves."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Prefix]:
        prefixes = []
        for prompt in prompts:
            output = self.model(input_ids=torch.tensor([list(prompt)]), use_cache=True)
            prefixes.append(Prefix(len(prompt), output.past_key_values, output.logits[0, -1].float()))
        return prefixes

    def prompt_logits(self, prompt: Sequence[int], start: int) -> torch.Tensor:
        output = self.model(input_ids=torch.tensor([list(prompt)]), use_cache=False)
        logits: torch.Tensor = output.logits[0, start:].float()
        return logits

    def place(self, row: int, count: int, prefix: Prefix) -> None:
        for offset in range(count):
            self._caches[row + offset] = copy.deepcopy(prefix.cache)

    def move(self, source: int, target: int, tokens: int) -> None:
        self._caches[target] = self._caches.pop(source)

    def clear(self, row: int) -> None:
        self._caches.pop(row, None)

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
        logits = []
        for row in range(tokens.shape[0]):
            output = self.model(input_ids=tokens[row].view(1, 1), past_key_values=self._caches[row], use_cache=True)
            self._caches[row] = output.past_key_values
            logits.append(output.logits[0, -1].float())
        return torch.stack(logits)
