"""Prompts, tools and multi-turn episodes: what the policy is asked, and what answers it between its turns."""

from colchis.components.environments.interface import (
    Environment,
    Episode,
    ModelTurn,
    Prompt,
    Reply,
    SingleTurn,
)
from colchis.components.environments.opening import generate_rows, open_environment
from colchis.components.environments.prompts import heldout, select
from colchis.components.environments.text_model import TextModel, check_prompts
from colchis.components.environments.tokenizer import Tokenizer

__all__ = [
    "Environment",
    "Episode",
    "ModelTurn",
    "Prompt",
    "Reply",
    "SingleTurn",
    "TextModel",
    "Tokenizer",
    "check_prompts",
    "generate_rows",
    "heldout",
    "open_environment",
    "select",
]
