"""Colchis: RL post-training of language models as Argo Workflows."""

__version__ = "0.1.0"
