"""Manifests as they stand in files: the parsed body, and the YAML nodes that tell how each value was written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Json = Any

# Readers of YAML disagree on these: PyYAML, go-yaml (kubectl, Argo) and YAML 1.2 each take some for a string and some not.
_READ_DIFFERENTLY = re.compile(
    r"""(?:
        y|Y|n|N|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF|True|TRUE|False|FALSE | ~|Null|NULL
      | [-+]?0[0-9_]+ | [-+]?0[xob][0-9a-fA-F_]+ | \+[0-9].* | [-+]?[0-9]+(?:_[0-9_]*)+
      | [-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?
      | [-+]?(?:\.[0-9]+|[0-9]+\.?[0-9]*)[eE][-+]?[0-9]+ | [-+]?\.[0-9]+ | [-+]?[0-9]+\.
      | [-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)
      | [0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt ].*)?
    )""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Document:
    """One YAML document of a file."""

    file: str
    body: dict[str, Json]
    node: yaml.Node

    @property
    def kind(self) -> str:
        return str(self.body.get("kind", ""))

    @property
    def name(self) -> str:
        metadata = self.body.get("metadata") or {}
        return str(metadata.get("name") or metadata.get("generateName") or "")

    @property
    def is_argo(self) -> bool:
        return str(self.body.get("apiVersion", "")).startswith("argoproj.io/") and self.kind in (
            "Workflow",
            "WorkflowTemplate",
        )


def parse(text: str, file: str) -> list[Document]:
    """The documents of a YAML text that are mappings; raises yaml.YAMLError."""
    nodes = yaml.compose_all(text, Loader=yaml.SafeLoader)
    bodies = yaml.safe_load_all(text)
    return [Document(file, body, node) for node, body in zip(nodes, bodies, strict=True) if isinstance(body, dict)]


def read(path: Path) -> list[Document]:
    """The documents of a file; raises yaml.YAMLError."""
    return parse(path.read_text(encoding="utf-8"), str(path))


def misreadable(node: yaml.Node, path: str = "") -> Iterator[tuple[str, str]]:
    """(field, value) of every unquoted scalar, key or value, that readers of YAML take for different things."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            field = f"{path}.{key.value}" if path else str(key.value)
            yield from misreadable(key, f"{field} (the key)")
            yield from misreadable(value, field)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield from misreadable(item, f"{path}[{i}]")
    elif isinstance(node, yaml.ScalarNode) and node.style is None and _READ_DIFFERENTLY.fullmatch(node.value):
        yield path, node.value


def repeated_keys(node: yaml.Node, path: str = "") -> Iterator[str]:
    """Fields that stand twice in one mapping: PyYAML keeps the last silently, kubectl refuses."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            field = f"{path}.{key.value}" if path else str(key.value)
            if key.value in seen:
                yield field
            seen.add(key.value)
            yield from repeated_keys(value, field)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield from repeated_keys(item, f"{path}[{i}]")
