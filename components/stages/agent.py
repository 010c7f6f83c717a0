"""agent: the sidecar beside an engine."""

from __future__ import annotations

from colchis.components.agent.command import command

__all__ = ["command"]
