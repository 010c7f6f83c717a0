"""Any task of the reasoning-gym library as a single-turn environment.

Importing the library costs seconds and its generators are slow: it is imported once, only where prompts are made or the
library's own score is asked for, never in a rollout pod. Note that the library's scores give partial credit for
substrings of the answer ("The answer is 3" for "3"); the face `exact` does not.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import re
import sys
import types
import warnings
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from colchis.components.config import ReasoningGymConfig
from colchis.components.environments.interface import Prompt, SingleTurn
from colchis.components.errors import BadConfig
from colchis.components.records.rows import Row


class _NoPycosat(types.ModuleType):
    """Stands in for a package that one family of tasks needs at run time but the library imports for all."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise BadConfig("this task needs the package 'pycosat', which is not installed", hint="pip install pycosat")


@functools.cache
def library() -> Any:
    """The module `reasoning_gym`, imported without a word on stdout or stderr. BadConfig when it is not installed."""
    if find_spec("reasoning_gym") is None:
        raise BadConfig("the package 'reasoning-gym' is not installed", hint="pip install 'colchis[environments]'")
    stand_in = find_spec("pycosat") is None
    if stand_in:
        sys.modules["pycosat"] = _NoPycosat("pycosat")
    fonts = logging.getLogger("matplotlib")  # a dependency of a dependency; reports that it looks for fonts
    level = fonts.level
    fonts.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            import reasoning_gym
    finally:
        fonts.setLevel(level)
        if stand_in:
            del sys.modules["pycosat"]
    return reasoning_gym


class ReasoningGym:
    """Prompts by `create_dataset(task, size=rows, seed=seed, **options)`."""

    def __init__(self, config: ReasoningGymConfig) -> None:
        self.config = config

    @property
    def version(self) -> str:
        try:
            return metadata.version("reasoning-gym")
        except metadata.PackageNotFoundError:
            return "not installed"

    def prompts(self) -> Iterator[Prompt]:
        """BadConfig for an unknown task, options it does not take, or a pattern that does not match."""
        c = self.config
        pattern = re.compile(c.prompt_pattern) if c.prompt_pattern is not None else None
        seen: set[str] = set()
        for number, entry in enumerate(self._entries()):
            question = str(entry["question"])
            if question in seen:  # some tasks ask the same again and accept several answers
                continue
            seen.add(question)
            prompt = question
            if pattern is not None:
                match = pattern.search(question)
                if match is None or (pattern.groups and match.group(1) is None):
                    raise BadConfig(
                        f"environment.prompt_pattern: {c.prompt_pattern!r} does not match row {number}",
                        where=question[:120],
                    )
                prompt = match.group(1 if pattern.groups else 0)
            answer = "" if entry["answer"] is None else str(entry["answer"])
            kept = {"question": question, "answer": entry["answer"], "metadata": entry["metadata"]}
            yield Prompt(c.prompt_template.replace("{prompt}", prompt), answer, kept)

    def _entries(self) -> Iterator[dict[str, Any]]:
        c = self.config
        for taken, field in (("size", "rows"), ("seed", "seed")):
            if taken in c.options:
                raise BadConfig(f"environment.options: '{taken}' is set by environment.{field}; remove it")
        library_ = library()
        if c.task not in library_.factory.DATASETS:
            raise BadConfig(
                f"environment.task: reasoning-gym {self.version} has no task '{c.task}'",
                hint=f"one of {', '.join(sorted(library_.factory.DATASETS))}",
            )
        try:
            tasks = library_.create_dataset(c.task, size=c.rows, seed=c.seed, **c.options)
            for i in range(c.rows):
                yield tasks[i]
        except BadConfig:
            raise
        except Exception as e:  # the library checks options by assert, and some only while it generates
            raise BadConfig(
                f"environment.options: task '{c.task}' cannot use {dict(c.options)} ({type(e).__name__}: {e})"
            ) from e

    def start(self, row: Row, seed: int) -> ReasoningGymEpisode:
        return ReasoningGymEpisode(row, task=self.config.task)


class ReasoningGymEpisode(SingleTurn):
    """One question; its score is the library's own."""

    def __init__(self, row: Row, *, task: str) -> None:
        super().__init__(row)
        self.task = task

    def score(self) -> float | None:
        if self.turn is None:
            return None
        return float(library().get_score_answer_fn(self.task)(self.turn.text.strip(), self.row.metadata))
