"""Computed prompts that are kept for the next request with the same prompt."""

from __future__ import annotations

from collections import OrderedDict

from colchis.components.engine.decoder import Prefix

Key = tuple[tuple[str, str], tuple[int, ...]]
"""The namespace of a sample, and the ids that are computed."""


class PrefixCache:
    """Whole prompts by namespace and ids, least recently used out first, at most `budget_tokens` prompt tokens together."""

    def __init__(self, budget_tokens: int) -> None:
        self.budget_tokens = budget_tokens
        self.tokens = 0
        self._prefixes: OrderedDict[Key, Prefix] = OrderedDict()

    def get(self, key: Key) -> Prefix | None:
        prefix = self._prefixes.get(key)
        if prefix is not None:
            self._prefixes.move_to_end(key)
        return prefix

    def put(self, key: Key, prefix: Prefix) -> None:
        """Keeps a prefix that is not in the cache yet; one longer than the whole budget is not kept."""
        if prefix.tokens > self.budget_tokens:
            return
        self._prefixes[key] = prefix
        self.tokens += prefix.tokens
        while self.tokens > self.budget_tokens:
            _, dropped = self._prefixes.popitem(last=False)
            self.tokens -= dropped.tokens

    def clear(self) -> None:
        self._prefixes.clear()
        self.tokens = 0
