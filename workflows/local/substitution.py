"""Tags: `{{name}}` and `{{=expression}}` in the strings of a manifest.

A tag that has no value is an error, as on a controller. Values are substituted once: Argo goes over a template several
times, so a value that itself contains `{{` would be read as a tag there. It is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from colchis.workflows.local.expression_tree import ExpressionError
from colchis.workflows.local.expressions import evaluate
from colchis.workflows.local.gotext import go_json

TAG = re.compile(r"\{\{(=)?(.*?)\}\}", re.DOTALL)
Json = TypeVar("Json")


class SubstitutionError(ValueError):
    """A tag that cannot be resolved, or a value that may not be substituted."""


def substitute(value: Json, scope: Mapping[str, str]) -> Json:
    """`value` with the tags of every string in it replaced from `scope` (dotted names). Raises SubstitutionError."""
    return cast(Json, _substitute(value, scope))


def _substitute(value: Any, scope: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return TAG.sub(lambda match: _resolve(match, scope), value) if "{{" in value else value
    if isinstance(value, Mapping):
        return {key: _substitute(item, scope) for key, item in value.items()}
    if isinstance(value, list):
        return [_substitute(item, scope) for item in value]
    return value


def _resolve(match: re.Match[str], scope: Mapping[str, str]) -> str:
    is_expression, body = match.groups()
    if is_expression:
        text = expression_text(body, scope)
    else:
        name = body.strip()
        if name not in scope:
            raise SubstitutionError(f"failed to resolve {{{{{body}}}}}")
        text = scope[name]
    if "{{" in text:
        raise SubstitutionError(
            f"the value of {match.group()} contains '{{{{', which a controller would substitute again"
        )
    return text


def expression_text(source: str, scope: Mapping[str, str]) -> str:
    """What `{{=source}}` is replaced by: a string as it is, anything else as JSON. Raises SubstitutionError."""
    try:
        result = evaluate(source, scope)
        text = result if isinstance(result, str) else go_json(result)
    except (ExpressionError, ValueError) as error:
        raise SubstitutionError(f"failed to evaluate expression: {error}") from error
    if result is None:
        raise SubstitutionError(f'failed to evaluate expression "{source}"')
    return text


def tags(value: Any) -> list[tuple[bool, str]]:
    """Every tag in the strings of `value`: (is it an expression, its text)."""
    if isinstance(value, str):
        return [(bool(sign), body.strip()) for sign, body in TAG.findall(value)]
    if isinstance(value, Mapping):
        return [tag for item in value.values() for tag in tags(item)]
    if isinstance(value, list):
        return [tag for item in value for tag in tags(item)]
    return []
