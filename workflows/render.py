"""Hera -> manifests: the files that a cluster runs and the local interpreter reads."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from hera.workflows import WorkflowTemplate

from colchis.components.errors import BadConfig
from colchis.workflows.sync import sync
from colchis.workflows.templates import DIGEST, Shape

MODES: Mapping[str, Callable[[Shape], WorkflowTemplate]] = {"sync": sync}

REPOSITORY = Path(__file__).resolve().parents[1]
MANIFESTS = REPOSITORY / "manifests"
TEMPLATES = MANIFESTS / "base" / "templates"
SHAPES = MANIFESTS / "shapes"

HEADER = "# Made by `colchis render` from workflows/*.py and manifests/shapes/*.yaml. Change those.\n"


class _Dumper(yaml.SafeDumper):
    """Quotes every string value: YAML 1.1 reads a bare `n` as false and a bare `1e3` as text."""


def _string(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _string)


class _KeyDumper(_Dumper):
    """As above, but mapping keys that need no quotes stay bare."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        node = super().represent_mapping(tag, mapping, flow_style)
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value.replace("-", "").replace("_", "").isalpha():
                key.style = None
        return node


def to_yaml(document: Mapping[str, Any]) -> str:
    """One YAML document with every string value quoted, keys in their given order."""
    return yaml.dump(dict(document), Dumper=_KeyDumper, sort_keys=False, width=120, allow_unicode=True)


def read_shapes(folder: Path = SHAPES) -> list[Shape]:
    """The shapes in `folder`, one per file, named by the file."""
    shapes = []
    for path in sorted(folder.glob("*.yaml")):
        document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        try:
            shapes.append(Shape(name=path.stem, **document))
        except TypeError as e:
            known = ", ".join(f for f in Shape.__dataclass_fields__ if f != "name")
            raise BadConfig(f"{path}: {e}; known fields: {known}") from None
    if not shapes:
        raise BadConfig(f"{folder}: no shapes found; expected files such as cpu.yaml")
    return shapes


def render(shapes: Iterable[Shape] | None = None) -> dict[str, str]:
    """File name -> text of every WorkflowTemplate: one per mode and shape."""
    files = {}
    for shape in shapes if shapes is not None else read_shapes():
        for mode, build in MODES.items():
            template = build(shape).to_dict()
            text = to_yaml(template)
            text = text.replace(DIGEST, hashlib.sha256(text.encode()).hexdigest())
            files[f"colchis-{mode}-{shape.name}.yaml"] = HEADER + text
    return files


def write(folder: Path = TEMPLATES) -> list[Path]:
    """Write all manifests and remove rendered files that no longer have a source."""
    folder.mkdir(parents=True, exist_ok=True)
    files = render()
    for stale in set(folder.glob("colchis-*.yaml")) - {folder / name for name in files}:
        stale.unlink()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]


def drift(folder: Path = TEMPLATES) -> str:
    """Unified diff between the files in `folder` and what would be rendered; empty when they agree."""
    files = render()
    present = {p.name: p.read_text(encoding="utf-8") for p in folder.glob("colchis-*.yaml")}
    pieces: list[str] = []
    for name in sorted(files.keys() | present.keys()):
        old, new = present.get(name, ""), files.get(name, "")
        pieces += difflib.unified_diff(
            old.splitlines(keepends=True), new.splitlines(keepends=True), f"{folder}/{name}", "rendered"
        )
    return "".join(pieces)


def read_templates(folder: Path = TEMPLATES) -> dict[str, dict[str, Any]]:
    """The rendered WorkflowTemplates by name, as the local interpreter takes them."""
    templates = {}
    for path in sorted(folder.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if document and document.get("kind") == "WorkflowTemplate":
                templates[document["metadata"]["name"]] = document
    if not templates:
        raise BadConfig(f"{folder}: no WorkflowTemplates found", hint="make them with `colchis render`")
    return templates
