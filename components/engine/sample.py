"""A sample (one continuation of one prompt) and the table of running samples, one array row each."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from colchis.components.engine.sampling import GREEDY_TEMPERATURE, SamplingParams


@dataclass
class VersionSpan:
    """Output tokens [start, end) were produced under this weight version."""

    version: str
    start: int
    end: int = 0


@dataclass(eq=False)
class Sample:
    """One continuation on its way through the engine; only the scheduler's thread writes it until it is finished."""

    id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    logprob_start: int = -1
    top_logprobs: int = 0
    token_ids_logprob: list[int] = field(default_factory=list)
    streamed: bool = False
    namespace: tuple[str, str] = ("", "")
    """extra_key and cache_salt: computed prompts are shared only between samples that have the same."""
    order: int = 0
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    output_top: list[list[tuple[float, int]]] = field(default_factory=list)
    output_chosen: list[list[float]] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    input_top: list[list[tuple[float, int]]] = field(default_factory=list)
    input_chosen: list[list[float]] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    retractions: int = 0
    cached_tokens: int = 0
    admitted: bool = False
    finish_reason: dict[str, Any] | None = None
    created_s: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def watched(self) -> bool:
        """Whether every token needs a look of its own (a stream, a stop string, extra log-probs)."""
        return bool(self.streamed or self.params.stop or self.top_logprobs or self.token_ids_logprob)

    @property
    def needed_tokens(self) -> int:
        """Cache positions that the sample may come to occupy."""
        return len(self.prompt) + self.params.max_new_tokens

    def note_version(self, version: str, produced: int) -> None:
        """Tokens from `produced` on come from `version`."""
        if self.spans and self.spans[-1].version == version:
            return
        if self.spans and self.spans[-1].start == produced:
            self.spans.pop()
        if not self.spans or self.spans[-1].version != version:
            self.spans.append(VersionSpan(version, produced))

    def finish(self, reason: dict[str, Any]) -> None:
        self.finish_reason = reason
        self.finished_s = time.perf_counter()
        ends = [*(span.start for span in self.spans[1:]), len(self.output_ids)]
        for span, end in zip(self.spans, ends, strict=bool(self.spans)):
            span.end = end


class Rows:
    """The running samples as arrays, rows 0..count-1 without a hole. Row r here is row r of the decoder's cache."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self.samples: list[Sample] = []
        self.token = np.zeros(capacity, np.int64)
        self.position = np.zeros(capacity, np.int64)
        self.produced = np.zeros(capacity, np.int64)
        self.max_new = np.zeros(capacity, np.int64)
        self.min_new = np.zeros(capacity, np.int64)
        self.needed = np.zeros(capacity, np.int64)
        self.replay = np.zeros(capacity, np.int64)
        self.seed = np.zeros(capacity, np.uint64)
        self.temperature = np.ones(capacity, np.float32)
        self.greedy = np.zeros(capacity, np.bool_)
        self.filtered = np.zeros(capacity, np.bool_)
        self.watched = np.zeros(capacity, np.bool_)
        self.top_k = np.zeros(capacity, np.int64)
        self.top_p = np.ones(capacity, np.float32)
        self.min_p = np.zeros(capacity, np.float32)
        self.stop_ids = np.full((capacity, 1), -1, np.int64)
        self.output_ids = np.zeros((capacity, 32), np.int64)
        self.logprobs = np.zeros((capacity, 32), np.float32)
        self._per_row = [name for name, value in vars(self).items() if isinstance(value, np.ndarray)]
        self.torch_token = torch.from_numpy(self.token)
        self.torch_position = torch.from_numpy(self.position)
        self.torch_temperature = torch.from_numpy(self.temperature).unsqueeze(1)

    def _widen(self, name: str, width: int, fill: int) -> None:
        """Grows a two-dimensional array to at least `width` columns."""
        old = getattr(self, name)
        if width > old.shape[1]:
            grown = np.full((self.capacity, max(width, 2 * old.shape[1])), fill, old.dtype)
            grown[:, : old.shape[1]] = old
            setattr(self, name, grown)

    def add(self, sample: Sample, vocab: int, *, replays: bool) -> int:
        """Appends a sample and returns its row. Of a retracted one, the cache holds prompt and output, or (`replays`)
        the prompt alone: then its tokens are fed again, step by step.
        """
        row, params = self.count, sample.params
        produced, restored = 0 if replays else len(sample.output_ids), len(sample.output_ids)
        self._widen("output_ids", params.max_new_tokens, 0)
        self._widen("logprobs", params.max_new_tokens, 0)
        self._widen("stop_ids", len(sample.stop_ids), -1)
        self.samples.append(sample)
        self.position[row] = len(sample.prompt) + produced - 1
        self.produced[row] = produced
        self.replay[row] = restored
        self.max_new[row] = params.max_new_tokens
        self.min_new[row] = params.min_new_tokens
        self.needed[row] = sample.needed_tokens
        self.seed[row] = sample.seed
        self.temperature[row] = 1.0 if params.temperature <= GREEDY_TEMPERATURE else params.temperature
        self.greedy[row] = params.greedy
        self.filtered[row] = params.filtered and not params.greedy
        self.watched[row] = sample.watched
        self.top_k[row] = params.top_k if params.top_k > 0 else vocab
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(sample.stop_ids)] = list(sample.stop_ids)
        self.output_ids[row, :restored] = sample.output_ids
        self.logprobs[row, :restored] = sample.logprobs
        self.count += 1
        return row

    def kept(self, row: int) -> int:
        """Output tokens that the row's sample has, those still to be replayed included."""
        return max(int(self.produced[row]), int(self.replay[row]))

    def collect(self, row: int) -> Sample:
        """Writes the row's output into its sample."""
        sample, produced = self.samples[row], self.kept(row)
        sample.output_ids = self.output_ids[row, :produced].tolist()
        sample.logprobs = self.logprobs[row, :produced].tolist()
        return sample

    def remove(self, row: int) -> int | None:
        """Frees a row; the last row takes its place. Returns the row that moved, None if it was the last itself."""
        last = self.count - 1
        if row != last:
            for name in self._per_row:
                array = getattr(self, name)
                array[row] = array[last]
            self.samples[row] = self.samples[last]
        self.samples.pop()
        self.count = last
        return last if row != last else None
