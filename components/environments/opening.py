"""From the configuration to an environment and its table of rows."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from colchis.components.config import DatasetConfig, EnvironmentConfig, OwnEnvironmentConfig, ReasoningGymConfig
from colchis.components.environments.dataset import Dataset
from colchis.components.environments.interface import Environment, Prompt
from colchis.components.environments.reasoning_gym import ReasoningGym
from colchis.components.errors import BadConfig, BadData, ColchisError
from colchis.components.records.rows import Row, Rows, Split

ENTRY_POINTS = "colchis.environments"


def open_environment(config: EnvironmentConfig, *, dataset: Path | None = None) -> Environment:
    """The environment of a run. `dataset` (file, or folder that holds exactly one) is only read by `prompts`, so
    stages that have the rows from the store leave it out. BadConfig when it cannot be constructed."""
    match config:
        case ReasoningGymConfig():
            return ReasoningGym(config)
        case DatasetConfig():
            return Dataset(config, dataset)
        case OwnEnvironmentConfig():
            return _own(config)


def _own(config: OwnEnvironmentConfig) -> Environment:
    found = metadata.entry_points(group=ENTRY_POINTS)
    point = next((p for p in found if p.name == config.name), None)
    if point is None:
        known = ", ".join(sorted(p.name for p in found)) or "none"
        raise BadConfig(
            f"environment.name: no entry point '{config.name}' in the group '{ENTRY_POINTS}', installed: {known}",
            hint="install your package in the image (or environment) of the stages",
        )
    try:
        environment = point.load()(seed=config.seed, **config.options)
    except ColchisError:
        raise
    except Exception as e:  # the user's code may raise anything
        raise BadConfig(
            f"environment '{config.name}' cannot be constructed ({type(e).__name__}: {e})", where=point.value
        ) from e
    if not isinstance(environment, Environment):
        lacking = [n for n in ("version", "prompts", "start") if not hasattr(environment, n)]
        raise BadConfig(f"environment '{config.name}' lacks {', '.join(lacking)}", where=point.value)
    return environment


def generate_rows(config: EnvironmentConfig, *, dataset: Path | None = None) -> Rows:
    """The table of rows: distinct prompts, held-out ones apart. Made once per run and stored; some generators depend on
    PYTHONHASHSEED, so a second call may give another table and no stage but the first ever makes one.

    BadConfig when there are too few distinct prompts, BadData when one prompt has two answers.
    """
    environment = open_environment(config, dataset=dataset)
    try:
        prompts = list(environment.prompts())
    except ColchisError:
        raise
    except Exception as e:  # the user's code may raise anything
        raise BadConfig(f"environment '{_name(config)}' cannot make its prompts ({type(e).__name__}: {e})") from e
    distinct: dict[str, tuple[int, Prompt]] = {}
    for number, prompt in enumerate(prompts):
        _check_prompt(prompt, number, _name(config))
        first, known = distinct.setdefault(prompt.text, (number, prompt))
        if known.answer != prompt.answer:
            raise BadData(
                f"rows {first} and {number} have the same prompt {prompt.text[:60]!r} but different answers "
                f"{known.answer[:40]!r} and {prompt.answer[:40]!r}",
                where=f"environment '{_name(config)}'",
                hint="make the prompts distinct (environment.prompt_pattern may cut away what tells them apart)",
            )
        if known.split is not prompt.split:
            raise BadData(
                f"rows {first} and {number} have the same prompt {prompt.text[:60]!r} in two splits",
                where=f"environment '{_name(config)}'",
            )
    return _split([prompt for _, prompt in distinct.values()], getattr(config, "rows", len(prompts)), config)


def _check_prompt(prompt: object, number: int, name: str) -> None:
    if not isinstance(prompt, Prompt):
        raise BadData(f"row {number}: expected a Prompt, found {type(prompt).__name__}", where=f"environment '{name}'")
    for field, text in (("prompt", prompt.text), ("answer", prompt.answer)):
        if not isinstance(text, str):
            raise BadData(f"row {number}: {field} is {type(text).__name__}, expected text", where=name)
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise BadData(f"row {number}: {field} is not valid Unicode ({e.reason})", where=name) from None
    if not prompt.text.strip():
        raise BadData(f"row {number}: prompt is empty", where=name)


def _split(prompts: Sequence[Prompt], generated: int, config: EnvironmentConfig) -> Rows:
    """Draw the held-out prompts by a hash of seed and prompt: the same ones whatever the order of the rows, the process
    or the versions of the libraries."""
    own = sum(p.split is not None for p in prompts)
    if own == len(prompts) > 0:
        splits = {p.text: p.split for p in prompts}
        counts = [sum(s is split for s in splits.values()) for split in Split]
        if 0 in counts:
            raise BadConfig(f"environment '{_name(config)}': {counts[0]} training and {counts[1]} held-out prompts")
    elif own:
        raise BadConfig(f"environment '{_name(config)}' sets the split of {own} of {len(prompts)} prompts, not of all")
    else:
        if len(prompts) < config.heldout_rows + 1:
            raise BadConfig(
                f"environment '{_name(config)}': {len(prompts)} distinct prompts in {generated} rows, "
                f"fewer than heldout_rows + 1 = {config.heldout_rows + 1}",
                hint="lower environment.heldout_rows or make more rows",
            )
        drawn = sorted(prompts, key=lambda p: hashlib.sha256(f"{config.seed}/{p.text}".encode()).digest())
        heldout = {p.text for p in drawn[: config.heldout_rows]}
        splits = {p.text: Split.HELDOUT if p.text in heldout else Split.TRAIN for p in prompts}
    return Rows(
        Row(i, p.text, p.answer, splits[p.text] or Split.TRAIN, _plain(dict(p.metadata))) for i, p in enumerate(prompts)
    )


def _name(config: EnvironmentConfig) -> str:
    match config:
        case ReasoningGymConfig():
            return config.task
        case DatasetConfig():
            return "dataset"
        case OwnEnvironmentConfig():
            return config.name


def _plain(value: Any) -> Any:
    """As JSON keeps it: tuples and sets become lists, numpy scalars numbers, anything else its text."""
    match value:
        case None | bool() | str() | int():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(k): _plain(v) for k, v in value.items()}
        case list() | tuple():
            return [_plain(v) for v in value]
        case set() | frozenset():
            return sorted((_plain(v) for v in value), key=json.dumps)
    item = getattr(value, "tolist", None)
    return _plain(item()) if callable(item) else str(value)
