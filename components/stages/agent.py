"""agent: the sidecar beside an engine."""

from __future__ import annotations

from colchis.components.agent.__main__ import command

__all__ = ["command"]
