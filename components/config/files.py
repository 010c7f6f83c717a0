"""Reading a configuration: YAML file, dotted overrides, and the sections as Argo hands them over."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from colchis.components.config.run_config import RunConfig, parse
from colchis.components.errors import BadConfig

DEEPEST = 20
SECTIONS = tuple(RunConfig.model_fields)
"""Names of the top-level sections, which are the names of the WorkflowTemplates' parameters."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a repeated key, an alias and deep nesting, and reads 1e-5 as a number.

    A few aliases of aliases make gigabytes of a few lines; no configuration needs them, nor a tenth level.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        where = f"line {self.peek_event().start_mark.line + 1}"  # type: ignore[no-untyped-call]
        if self.check_event(yaml.AliasEvent):
            raise BadConfig("an alias (*name) is not taken", where=where, hint="write the value out")
        if self._depth == DEEPEST:
            raise BadConfig(f"nested deeper than {DEEPEST} levels", where=where, hint="is this a configuration?")
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise BadConfig(f"key '{key}' occurs twice", where=f"line {key_node.start_mark.line + 1}")
        seen.add(key)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_document(path: Path) -> dict[str, Any]:
    """The YAML mapping in `path`, unvalidated. BadConfig when it cannot be read as one."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except BadConfig as e:
        raise BadConfig(e.what, where=f"{path}, {e.where}", hint=e.hint) from None
    except FileNotFoundError:
        raise BadConfig(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as e:
        raise BadConfig(f"{path}: cannot be read ({e})") from None
    except yaml.YAMLError as e:
        raise BadConfig(f"{path}: not YAML: {' '.join(str(e).split())}") from None
    if not isinstance(document, dict):
        raise BadConfig(f"{path}: expected a mapping of sections, found {type(document).__name__}")
    return document


def override(document: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Apply `section.field=value` assignments; the value is read as YAML.

    >>> override({"loop": {"seed": 1}}, ["loop.iterations=3", "algorithm.clip_high=0.28"])
    {'loop': {'seed': 1, 'iterations': 3}, 'algorithm': {'clip_high': 0.28}}
    """
    result: dict[str, Any] = json.loads(json.dumps(document, default=str))
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise BadConfig(f"--set {assignment}: expected SECTION.FIELD=VALUE, e.g. --set algorithm.clip_high=0.28")
        *path, last = name.strip().split(".")
        target = result
        for part in path:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise BadConfig(f"--set {assignment}: '{part}' is a value, not a section")
        try:
            value = target[last] = _number_or(yaml.load(text, Loader=_Loader))
        except yaml.YAMLError as e:
            raise BadConfig(f"--set {assignment}: value is not YAML ({' '.join(str(e).split())})") from None
        if isinstance(value, dict) and not text.lstrip().startswith("{"):
            raise BadConfig(
                f"--set {assignment}: YAML reads the value as a mapping", hint=f"quote it: {name}='\"...\"'"
            )
    return result


def _number_or(value: Any) -> Any:
    """YAML 1.1 takes 5e-4 for text; users mean a number."""
    if isinstance(value, str):
        try:
            return float(value) if any(c in value for c in "eE.") and value[:1] in "+-.0123456789" else value
        except ValueError:
            return value
    return value


def load(path: Path, assignments: Iterable[str] = ()) -> RunConfig:
    """Read, override and validate a configuration file."""
    return parse(override(read_document(path), assignments), source=str(path))


def from_parameters(parameters: Mapping[str, str]) -> RunConfig:
    """The configuration from Argo parameters: one JSON or YAML text per section; an empty text means defaults."""
    unknown = sorted(set(parameters) - set(SECTIONS))
    if unknown:
        raise BadConfig(f"parameter '{unknown[0]}' is no section of the configuration; known: {', '.join(SECTIONS)}")
    document: dict[str, Any] = {}
    for name, text in parameters.items():
        if not text.strip():
            continue
        try:
            document[name] = yaml.load(text, Loader=_Loader)
        except yaml.YAMLError as e:
            raise BadConfig(f"parameter '{name}': not YAML ({' '.join(str(e).split())})") from None
    return parse(document, source="parameters")


def to_parameters(config: RunConfig) -> dict[str, str]:
    """The sections as Argo parameters, canonical JSON each; `from_parameters` is the inverse."""
    document = config.model_dump(mode="json")
    return {
        name: value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))
        for name, value in document.items()
    }
