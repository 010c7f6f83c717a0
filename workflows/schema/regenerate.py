"""Makes workflow.json, the closed schema of Workflows and WorkflowTemplates, out of Argo's full CRDs.

    python workflows/schema/regenerate.py FOLDER        # with argoproj.io_workflows.yaml (or .json) and so on

What a CRD leaves open, these close: an object with declared properties takes no others, so that a typo is an error.
Rules in CEL and everything that crosses objects are in `workflows/lint.py`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
KINDS = ("workflows", "workflowtemplates")
DRAFT = "https://json-schema.org/draft/2020-12/schema"
DROPPED = ("description", "default", "format", "nullable")
SHARE_FROM_BYTES = 300
"""Subschemas that occur twice and are at least this long stand once under $defs."""

Schema = Any


def closed(schema: Schema) -> Schema:
    """An OpenAPI schema of a CRD as a closed JSON schema, draft 2020-12."""
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key.startswith("x-kubernetes") or key in DROPPED:
            continue
        if key == "properties":
            result[key] = {name: closed(part) for name, part in value.items()}
        elif key in ("items", "additionalProperties"):
            result[key] = closed(value)
        elif key in ("anyOf", "allOf", "oneOf"):
            result[key] = [closed(part) for part in value]
        else:
            result[key] = value
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in result and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result


def shared(schema: Schema) -> Schema:
    """The same schema with repeated parts under $defs: a fifth of the size."""
    counts: Counter[str] = Counter()
    names: dict[str, str] = {}

    def count(part: Schema, name: str) -> None:
        if isinstance(part, dict):
            text = json.dumps(part, sort_keys=True)
            if "type" in part and len(text) >= SHARE_FROM_BYTES:
                counts[text] += 1
                names.setdefault(text, name)
            for key, value in part.items():
                count(value, name if key in ("items", "properties", "additionalProperties") else key)
        elif isinstance(part, list):
            for value in part:
                count(value, name)

    def replace(part: Schema, *, whole: bool = True) -> Schema:
        if isinstance(part, dict):
            text = json.dumps(part, sort_keys=True)
            if whole and text in references:
                return {"$ref": f"#/$defs/{references[text]}"}
            return {key: replace(value) for key, value in part.items()}
        return [replace(value) for value in part] if isinstance(part, list) else part

    count(schema, "root")
    references: dict[str, str] = {}
    for text, times in counts.items():
        if times > 1:
            same_name = sum(1 for used in references.values() if used.split(".")[0] == names[text])
            references[text] = f"{names[text]}.{same_name}" if same_name else names[text]
    definitions = {name: replace(json.loads(text), whole=False) for text, name in references.items()}
    return {**replace(schema), "$defs": dict(sorted(definitions.items()))}


def of_kind(folder: Path, kind: str) -> Schema:
    """The closed schema of one CRD, without status and with free metadata."""
    source = next(p for p in sorted(folder.glob(f"argoproj.io_{kind}.*")) if p.suffix in (".json", ".yaml"))
    crd = yaml.load(source.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    version = next(v for v in crd["spec"]["versions"] if v["name"] == "v1alpha1")
    schema = closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    schema["properties"].pop("status", None)
    return schema


def main(folder: Path) -> None:
    schema, other = (of_kind(folder, kind) for kind in KINDS)
    if schema != other:
        raise SystemExit("Workflow and WorkflowTemplate differ in this version of Argo: write one schema for each")
    text = json.dumps({"$schema": DRAFT, **shared(schema)}, sort_keys=True, separators=(",", ":"))
    (HERE / "workflow.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
