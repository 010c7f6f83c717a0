"""The static decode loop: own forward over fused weights, with a preallocated key-value cache and compact rows.

Rows 0..n-1 of the cache are the running samples, always without a hole, so a step reads views and copies nothing.
Shapes in comments: B rows, P prompt tokens, W attention window, H heads, K kv heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from colchis.components.engine.architecture import Architecture, Rope, RopeKind
from colchis.components.engine.weights import Layer, Linear, StaticWeights

WINDOWS = (16, 32, 48, 64, 96, 128, 192, 256)
"""Attention windows of short rows; above, multiples of BLOCK_TOKENS."""

BLOCK_TOKENS = 512
"""Key block of torch's CPU attention kernel: with windows of whole blocks the masked end never changes a row's bits.
Inside a block the sum over keys may split by the window's width, so short windows are measured (see `invariance`)."""

HEAD_TOKENS = 512
"""Prompt positions whose logits are computed at once: bounds the [positions, V] buffer."""


@dataclass(frozen=True)
class Prefix:
    """A computed prompt: its keys and values [layers, 2K, P, D] and the logits [V] after its last token."""

    tokens: int
    cache: object
    logits: torch.Tensor


class Decoder(Protocol):
    """What the scheduler asks of a model."""

    architecture: Architecture

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]: ...
    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Prefix]: ...
    def prompt_logits(self, prompt: Sequence[int], start: int) -> torch.Tensor: ...
    def reserve(self, rows: int, tokens: int) -> None: ...
    def place(self, row: int, count: int, prefix: Prefix) -> None: ...
    def move(self, source: int, target: int, tokens: int) -> None: ...
    def clear(self, row: int) -> None: ...
    def step(self, tokens: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor: ...
    def reset(self) -> None: ...


def _inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Rotary inverse frequencies, float32 [D/2]. llama3 stretches long wavelengths (arXiv:2407.21783, as in HF)."""
    base = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.kind is RopeKind.DEFAULT:
        return base
    if rope.kind is RopeKind.LINEAR:
        return base / rope.factor
    low_wavelength = rope.original_context_tokens / rope.low_freq_factor
    high_wavelength = rope.original_context_tokens / rope.high_freq_factor
    wavelength = 2 * math.pi / base
    stretched = torch.where(wavelength > low_wavelength, base / rope.factor, base)
    smooth = (rope.original_context_tokens / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smoothed = (1 - smooth) * stretched / rope.factor + smooth * stretched
    medium = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return torch.where(medium, smoothed, stretched)


def _linear(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    return F.linear(x, linear.weight, linear.bias)


def _add_linear(residual: torch.Tensor, x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """residual + x W^T (+ bias), one kernel where there is no bias. All 2-D."""
    if linear.bias is None:
        return torch.addmm(residual, x, linear.weight.t())
    return residual + F.linear(x, linear.weight, linear.bias)


class StaticDecoder:
    """Llama and Qwen2/3 on a static cache. `quantum`: row counts of every product are padded to a multiple of it,
    which makes a row's bits independent of its companions (see `invariance`); 1 pads nothing.
    """

    def __init__(self, weights: StaticWeights, quantum: int = 1, windows: tuple[int, ...] = WINDOWS) -> None:
        self.weights = weights
        self.architecture = weights.architecture
        self.quantum = quantum
        self.windows = windows
        self._frequencies = _inverse_frequencies(self.architecture.rope, self.architecture.head_dim)
        self._cos = self._sin = torch.empty(0, self.architecture.head_dim)
        self._cache = self._empty(0, 0)

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.weights.named_tensors()

    def _empty(self, rows: int, tokens: int) -> torch.Tensor:
        """Zeros, never uninitialised memory: a masked NaN still poisons the weighted sum of values."""
        a = self.architecture
        return torch.zeros(a.layers, rows, 2 * a.kv_heads, tokens, a.head_dim, dtype=self.weights.embed.dtype)

    def reset(self) -> None:
        """Gives the cache's memory back. No row may be running."""
        self._cache = self._empty(0, 0)

    def _window(self, tokens: int) -> int:
        """The cache positions that a step looks at when its longest row has `tokens`."""
        return next((window for window in self.windows if window >= tokens), -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS)

    def reserve(self, rows: int, tokens: int) -> None:
        """Makes room for `rows` rows of `tokens` tokens; what the cache holds stays."""
        old_rows, old_tokens = self._cache.shape[1], self._cache.shape[3]
        rows = -(-rows // self.quantum) * self.quantum
        tokens = self._window(tokens)
        if rows <= old_rows and tokens <= old_tokens:
            return
        grown = self._empty(max(rows, old_rows), max(tokens, old_tokens))
        grown[:, :old_rows, :, :old_tokens] = self._cache
        self._cache = grown
        self._rotary_tables(grown.shape[3])

    def _rotary_tables(self, tokens: int) -> None:
        """cos and signed sin [tokens, D], so that rope(x) = x cos + roll(x, D/2) sin with sin's first half negated."""
        if self._cos.shape[0] >= tokens:
            return
        angles = torch.outer(torch.arange(tokens, dtype=torch.float32), self._frequencies)
        cos, sin = angles.cos(), angles.sin()
        dtype = self.weights.embed.dtype
        self._cos = torch.cat((cos, cos), -1).to(dtype)
        self._sin = torch.cat((-sin, sin), -1).to(dtype)

    def place(self, row: int, count: int, prefix: Prefix) -> None:
        """Copies a computed prompt into rows row..row+count-1."""
        assert isinstance(prefix.cache, torch.Tensor)
        self._cache[:, row : row + count, :, : prefix.tokens] = prefix.cache.unsqueeze(1)

    def move(self, source: int, target: int, tokens: int) -> None:
        self._cache[:, target, :, :tokens] = self._cache[:, source, :, :tokens]

    def clear(self, row: int) -> None:
        """Zeroes a row whose values went non-finite."""
        self._cache[:, row] = 0

    def _qkv(self, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotated queries and keys, and values: [tokens, H + 2K, D]. `x` is [tokens, hidden], cos [tokens, 1, D]."""
        a = self.architecture
        qkv = _linear(x, layer.qkv).view(x.shape[0], a.heads + 2 * a.kv_heads, a.head_dim)
        turned = qkv[:, : a.heads + a.kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = F.rms_norm(turned[:, : a.heads], (a.head_dim,), layer.q_norm, a.rms_eps)
            k = F.rms_norm(turned[:, a.heads :], (a.head_dim,), layer.k_norm, a.rms_eps)
            turned = torch.cat((q, k), 1)
        qkv[:, : a.heads + a.kv_heads] = torch.addcmul(turned * cos, turned.roll(a.head_dim // 2, -1), sin)
        return qkv

    def _mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        """x + down(silu(gate) * up), over [tokens, hidden]."""
        a = self.architecture
        gate_up = _linear(F.rms_norm(x, (a.hidden,), layer.post_norm, a.rms_eps), layer.gate_up)
        gate, up = gate_up[:, : a.intermediate], gate_up[:, a.intermediate :]
        return _add_linear(x, F.silu(gate).mul_(up), layer.down)

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
        """Feeds one token to each of rows 0..n-1 and returns the float32 logits [n, V] after it.

        `tokens`, `positions`: int64 [n]; `window`: at least the largest position + 1.
        """
        a, n = self.architecture, tokens.shape[0]
        padding = -n % self.quantum
        if padding:
            tokens, positions = F.pad(tokens, (0, padding)), F.pad(positions, (0, padding))
        rows = n + padding
        window = self._window(window)
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        # [B, 1, 1, W]: column c is visible to the row at position p when c <= p.
        visible = (torch.arange(window) <= positions.unsqueeze(1)).view(rows, 1, 1, window)
        mask = torch.zeros(visible.shape, dtype=cos.dtype).masked_fill_(~visible, -torch.inf)
        row_index = torch.arange(rows)
        x = F.embedding(tokens, self.weights.embed)
        for index, layer in enumerate(self.weights.layers):
            cache = self._cache[index, :rows]
            qkv = self._qkv(layer, F.rms_norm(x, (a.hidden,), layer.input_norm, a.rms_eps), cos, sin)
            cache[row_index, :, positions] = qkv[:, a.heads :]
            # Queries of one kv head form the query axis: grouped attention without repeating keys.
            q = qkv[:, : a.heads].view(rows, a.kv_heads, a.heads // a.kv_heads, a.head_dim)
            keys, values = cache[:, : a.kv_heads, :window], cache[:, a.kv_heads :, :window]
            attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            x = _add_linear(x, attended.reshape(rows, a.heads * a.head_dim), layer.o)
            x = self._mlp(layer, x)
        return self._logits(x)[:n]

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, V] of hidden states [tokens, hidden]."""
        a = self.architecture
        return F.linear(F.rms_norm(x, (a.hidden,), self.weights.norm, a.rms_eps), self.weights.head).float()

    def _forward(self, prompts: Sequence[Sequence[int]], cache: torch.Tensor | None) -> torch.Tensor:
        """Hidden states [B, P, hidden] of right-padded prompts; keys and values go to `cache` [layers, B, 2K, P, D].

        Padding comes after the prompt, so the causal mask alone keeps it out.
        """
        a, count = self.architecture, len(prompts)
        width = -(-max(map(len, prompts)) // self.quantum) * self.quantum
        self._rotary_tables(width)
        tokens = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
        cos = self._cos[:width].repeat(count, 1).unsqueeze(1)
        sin = self._sin[:width].repeat(count, 1).unsqueeze(1)
        x = F.embedding(tokens.view(-1), self.weights.embed)
        for index, layer in enumerate(self.weights.layers):
            qkv = self._qkv(layer, F.rms_norm(x, (a.hidden,), layer.input_norm, a.rms_eps), cos, sin)
            heads = qkv.view(count, width, a.heads + 2 * a.kv_heads, a.head_dim).transpose(1, 2)
            q, k, v = torch.split(heads, [a.heads, a.kv_heads, a.kv_heads], 1)
            if cache is not None:
                cache[index] = heads[:, a.heads :, : cache.shape[3]]
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = _add_linear(x, attended.transpose(1, 2).reshape(-1, a.heads * a.head_dim), layer.o)
            x = self._mlp(layer, x)
        return x.view(count, width, a.hidden)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Prefix]:
        """Computes distinct prompts together, padded to the longest: give prompts of similar length.

        With a quantum only prompts of one padded width go together: the attention kernel's blocks depend on it.
        """
        if self.quantum == 1:
            return self._prefill(prompts)
        by_width: dict[int, list[int]] = {}
        for place, prompt in enumerate(prompts):
            by_width.setdefault(-(-len(prompt) // self.quantum), []).append(place)
        prefixes: dict[int, Prefix] = {}
        for places in by_width.values():
            prefixes.update(zip(places, self._prefill([prompts[place] for place in places]), strict=True))
        return [prefixes[place] for place in range(len(prompts))]

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> list[Prefix]:
        a = self.architecture
        longest = max(map(len, prompts))
        cache = torch.empty(a.layers, len(prompts), 2 * a.kv_heads, longest, a.head_dim, dtype=self.weights.embed.dtype)
        hidden = self._forward(prompts, cache)
        last = hidden[torch.arange(len(prompts)), torch.tensor([len(prompt) - 1 for prompt in prompts])]
        logits = self._logits(F.pad(last, (0, 0, 0, -len(prompts) % self.quantum)))
        return [
            # Own memory for each, so that dropping one frees it.
            Prefix(len(prompt), cache[:, row, :, : len(prompt)].clone(), logits[row].clone())
            for row, prompt in enumerate(prompts)
        ]

    def prompt_logits(self, prompt: Sequence[int], start: int) -> torch.Tensor:
        """float32 logits [P - start, V] after each prompt token from position `start` on."""
        hidden = self._forward([prompt], None)[0]
        # Chunks begin at multiples of HEAD_TOKENS whatever `start` is, so their shapes depend on the prompt alone.
        first = start // HEAD_TOKENS * HEAD_TOKENS
        chunks = [self._logits(chunk) for chunk in torch.split(hidden[first:], HEAD_TOKENS)]
        return torch.cat(chunks)[start - first : len(prompt) - first]
