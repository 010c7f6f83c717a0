"""docs/configuration.md and the JSON schema, made from the models: their docstrings are the documentation."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from colchis.components.config.run_config import RunConfig

HEAD = """\
# Configuration

Made from `components/config/sections.py` by `colchis reference`; do not edit.

A run is configured by one YAML file with the sections below. The same sections are the parameters of the
WorkflowTemplates, so one file serves `colchis run`, `argo submit --parameter-file`, the submit form of the Argo UI and a
GitOps request. `colchis validate FILE` checks it; `--set section.field=value` overrides one field.

Fields marked **identity** make a run the run that it is: a run resumes only with the same identity. The others may
change when a run is resumed, and each change is recorded under `runs/RUN/changes/`.
"""


def json_schema() -> dict[str, Any]:
    """JSON schema of a run's configuration, for editors."""
    schema = RunConfig.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Colchis run", **schema}


def markdown() -> str:
    """The reference as Markdown."""
    lines = [HEAD]
    for name, field in RunConfig.model_fields.items():
        models = list(_models(field.annotation))
        lines.append(f"\n## {name}\n")
        if not models:
            lines += [
                f"{_text(field.description)}\n",
                f"- type: {_type(field)}",
                f"- default: {_default(field)}{_mark(field)}",
                "",
            ]
        for model in models:
            if len(models) > 1:
                lines.append(f"\n### {name}, kind `{get_args(model.model_fields['kind'].annotation)[0]}`\n")
            lines.append(f"{_text(model.__doc__)}\n")
            lines += field_table(model)
    return "\n".join(lines).rstrip() + "\n"


def field_table(model: type[BaseModel]) -> Iterator[str]:
    """The fields of a model as lines of a Markdown table."""
    yield "| field | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in model.model_fields.items():
        meaning = _text(field.description).replace("|", "\\|")
        yield f"| `{name}`{_mark(field)} | {_type(field)} | {_default(field)} | {meaning} |"


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if get_origin(annotation) is Annotated:
        yield from _models(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _models(part)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation


def _text(text: str | None) -> str:
    return " ".join((text or "").split())


def _mark(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    return " **identity**" if isinstance(extra, dict) and extra.get("identity") else ""


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        value: Any = field.default_factory()  # type: ignore[call-arg]
    elif field.default is PydanticUndefined:
        return "required"
    else:
        value = field.default
    return "unset" if value is None else f"`{value}`"


def _type(field: FieldInfo) -> str:
    return f"{_type_name(field.annotation)}{_bounds(field)}"


def _type_name(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " \\| ".join(f"`{a}`" for a in args)
    if origin in (Union, types.UnionType):
        return _type_name(next(a for a in args if a is not type(None)))
    if origin in (list, tuple, dict):
        return f"list of {_type_name(args[0])}" if origin is list else {tuple: "list", dict: "mapping"}[origin]
    names: dict[Any, str] = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _bounds(field: FieldInfo) -> str:
    signs = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
    found = [
        f"{sign} {getattr(m, name)}"
        for m in field.metadata
        for name, sign in signs
        if getattr(m, name, None) is not None
    ]
    return f", {', '.join(found)}" if found else ""
