"""The batch frame: scores become advantages, denominators and a plan, once, in float64, without torch."""

from colchis.components.batch.build import build_batch

__all__ = ["build_batch"]
