"""The engine's checksums of its own tensors, asked for a part at a time, so that an engine that serves goes on drawing tokens
between two parts: on a CPU it hashes about a gigabyte a second, and SGLang does nothing else meanwhile."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from colchis.components.agent.engine import Engine, EngineChecksums, EngineFacts
from colchis.components.records.weights import TensorEntry
from colchis.components.weights.architecture import fused
from colchis.components.weights.deadline import Deadline

PART_BYTES = 32 << 20
_MODULE = re.compile(r".*?\.\d+\.")
"""`model.layers.12.`: what all tensors of one layer begin with."""


class Hashing:
    """`check_in` is called between two parts, and raises when the agent is to stop."""

    def __init__(self, engine: Engine, check_in: Callable[[], None], *, part_bytes: int = PART_BYTES) -> None:
        self._engine, self._check_in, self._part_bytes = engine, check_in, part_bytes

    def checksums(self, facts: EngineFacts, expected: Sequence[TensorEntry], deadline: Deadline) -> EngineChecksums:
        """Of all tensors that the engine has. `expected` are those of the checkpoint that it should hold: they decide what goes
        into a part, and nothing else. An engine that is paused is asked once; so is one that hashes on its device, fast."""
        slow = facts.device == "cpu" and not facts.paused
        parts = cut({t.name: t.bytes for t in expected}, self._part_bytes) if slow else []
        if len(parts) < 2:
            return self._engine.checksums(deadline.left_s())
        found: EngineChecksums | None = None
        for part in parts:
            self._check_in()
            others = [pattern for other in parts if other is not part for pattern in other]
            more = self._engine.checksums(deadline.left_s(), without=others)
            found = more if found is None else found.with_more(more)
        assert found is not None
        return found


def cut(sizes: dict[str, int], part_bytes: int) -> list[list[str]]:
    """Checkpoint's tensor name -> bytes, as lists of what the names of the engine's tensors have in them: each list of about
    `part_bytes`, and each name in exactly one list. Empty where that cannot be had.

    >>> cut({"embed.weight": 8, "layers.0.up_proj.weight": 4, "layers.0.gate_proj.weight": 4, "layers.1.norm.weight": 1}, 9)
    [['embed.weight'], ['layers.0.', 'layers.1.']]
    """
    bytes_of: dict[str, int] = {}
    for name, members in fused(list(sizes)).items():
        module = _MODULE.match(name)
        pattern = module[0] if module else name
        bytes_of[pattern] = bytes_of.get(pattern, 0) + sum(sizes.get(member, 0) for member in members)
    if any(sum(pattern in name for pattern in bytes_of) != 1 for name in fused(list(sizes))):
        return []
    parts: list[list[str]] = []
    room = 0
    for pattern, size in bytes_of.items():
        if size > room:
            parts.append([])
            room = part_bytes
        parts[-1].append(pattern)
        room -= size
    return parts
