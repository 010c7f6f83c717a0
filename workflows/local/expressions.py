"""The accepted subset of expr-lang, parsed and evaluated by hand (never `eval`).

This is what stands in `{{=...}}`, in `retryStrategy.expression` and in `outputs.parameters[].valueFrom.expression`.
Precedence, types and error cases follow expr-lang v1 as Argo 4.0 embeds it:

- `/` always gives a float, `%` wants integers, `+` joins two strings but never a string and a number;
- `==` between different types is false when a type is only known at run time, and an error when both are known;
- `??` replaces nil (a name that does not exist below a name that does), nothing else;
- `asInt` and `asFloat` parse strings; both are of unknown type to the checker, `int` and `float` are not.

>>> evaluate("asInt(inputs.parameters.i) + 1 < 9", {"inputs.parameters.i": "3"})
True
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping

from colchis.workflows.local.expression_tree import (
    Binary,
    Call,
    Chain,
    Conditional,
    Constant,
    ExpressionError,
    ListOf,
    Member,
    Name,
    Tree,
    Unary,
    Value,
    parse,
)
from colchis.workflows.local.gotext import go_json, go_string


def nested(flat: Mapping[str, Value]) -> dict[str, Value]:
    """Dotted keys as nested maps; a key that is also a prefix of another one gives way, as in Argo's `expand`.

    >>> nested({"steps.a.outputs.result": "1", "steps.a": "x"})
    {'steps': {'a': {'outputs': {'result': '1'}}}}
    """
    prefixes = {key[:i] for key in flat for i, letter in enumerate(key) if letter == "."}
    root: dict[str, Value] = {}
    for key, value in flat.items():
        if key in prefixes:
            continue
        *parents, last = key.split(".")
        place = root
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return root


def evaluate(source: str | Tree, variables: Mapping[str, Value]) -> Value:
    """The value of an expression over dotted variables; raises ExpressionError."""
    tree = parse(source) if isinstance(source, str) else source
    return _value(tree, nested(variables))


def _value(tree: Tree, scope: Mapping[str, Value]) -> Value:
    match tree:
        case Constant(value=value):
            return value
        case Name(name=name):
            if name not in scope:
                raise ExpressionError(f"unknown name {name}")
            return scope[name]
        case Member(of=of, key=key, optional=optional):
            return _member(_value(of, scope), _value(key, scope), optional)
        case Chain(path=path):
            try:
                return _value(path, scope)
            except _NilInChain:
                return None
        case ListOf(items=items):
            return [_value(item, scope) for item in items]
        case Call(function=function, arguments=arguments):
            return _FUNCTIONS[function](_value(arguments[0], scope))
        case Unary(operator=operator, operand=operand):
            value = _value(operand, scope)
            if operator == "not":
                return not _bool("not", value)
            number = _number(operator, value)
            return -number if operator == "-" else number
        case Conditional(condition=condition, then=then, otherwise=otherwise):
            return _value(then if _bool("?:", _value(condition, scope)) else otherwise, scope)
        case Binary(operator=operator, left=left, right=right):
            first = _value(left, scope)
            if operator == "and":
                return _bool("and", first) and _bool("and", _value(right, scope))
            if operator == "or":
                return _bool("or", first) or _bool("or", _value(right, scope))
            if operator == "??":
                return first if first is not None else _value(right, scope)
            return _binary(operator, first, _value(right, scope))
    raise AssertionError(tree)


class _NilInChain(Exception):
    """The value before a `?.` is nil: the rest of the chain isn't evaluated."""


def _member(of: Value, key: Value, optional: bool) -> Value:
    if isinstance(of, Mapping):
        return of.get(key)
    if isinstance(of, list):
        if not isinstance(key, int) or isinstance(key, bool):
            raise ExpressionError(f"cannot index a list with {key!r}")
        if not -len(of) <= key < len(of):
            raise ExpressionError(f"index out of range: {key} (list of {len(of)})")
        return of[key]
    if of is None and optional:
        raise _NilInChain
    raise ExpressionError(f"cannot fetch {key} from {_shown(of)}")


def _bool(operator: str, value: Value) -> bool:
    if not isinstance(value, bool):
        raise ExpressionError(f"{operator} wants a boolean, got {_shown(value)}")
    return value


def _number(operator: str, value: Value) -> Value:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ExpressionError(f"invalid operation: {operator} {_shown(value)}")
    return value


def equal(left: Value, right: Value) -> bool:
    """Equality as in expr-lang: numbers by value, everything else only within one type."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, int | float) and isinstance(right, int | float):
        return left == right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(equal, left, right))
    return type(left) is type(right) and bool(left == right)


def _binary(operator: str, left: Value, right: Value) -> Value:
    if operator in ("==", "!="):
        return equal(left, right) == (operator == "==")
    if operator in ("in", "not in"):
        if not isinstance(right, list | Mapping):
            raise ExpressionError(f"operator in not defined on {_shown(right)}")
        found = left in right if isinstance(right, Mapping) else any(equal(left, item) for item in right)
        return found == (operator == "in")
    if isinstance(left, str) and isinstance(right, str):
        on_strings: dict[str, Callable[[str, str], Value]] = {
            "+": lambda a, b: a + b,
            "<": lambda a, b: a < b,
            ">": lambda a, b: a > b,
            "<=": lambda a, b: a <= b,
            ">=": lambda a, b: a >= b,
            "contains": lambda a, b: b in a,
            "startsWith": lambda a, b: a.startswith(b),
            "endsWith": lambda a, b: a.endswith(b),
            "matches": _matches,
        }
        if operator in on_strings:
            return on_strings[operator](left, right)
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (left, right))
    if not numbers or operator in ("contains", "startsWith", "endsWith", "matches"):
        raise ExpressionError(f"invalid operation: {_shown(left)} {operator} {_shown(right)}")
    return _arithmetic(operator, left, right)


def _matches(text: str, pattern: str) -> bool:
    try:
        return re.search(pattern, text) is not None
    except re.error as error:
        raise ExpressionError(f"bad pattern {pattern!r}: {error}") from error


def _arithmetic(operator: str, left: int | float, right: int | float) -> Value:
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/":
            if right == 0:
                return math.nan if left == 0 else math.copysign(math.inf, left)
            return left / right
        case "%":
            if isinstance(left, float) or isinstance(right, float):
                raise ExpressionError(f"invalid operation: {left} % {right} (wants integers)")
            if right == 0:
                raise ExpressionError("integer divide by zero")
            return int(math.copysign(abs(left) % abs(right), left)) if left else 0
        case "<":
            return left < right
        case ">":
            return left > right
        case "<=":
            return left <= right
        case _:
            return left >= right


def _shown(value: Value) -> str:
    return "<nil>" if value is None else json.dumps(value, default=str)


def _int(value: Value) -> int:
    if isinstance(value, bool) or value is None or isinstance(value, list | Mapping):
        raise ExpressionError(f"invalid argument for int: {_shown(value)}")
    if isinstance(value, str) and not re.fullmatch(r"[+-]?\d+", value):
        raise ExpressionError(f'invalid operation: int("{value}")')
    if isinstance(value, float) and not math.isfinite(value):
        raise ExpressionError(f"invalid operation: int({value})")
    return int(value)


def _float(value: Value) -> float:
    if isinstance(value, bool) or value is None or isinstance(value, list | Mapping):
        raise ExpressionError(f"invalid argument for float: {_shown(value)}")
    try:
        return float(value.strip() if isinstance(value, str) and value == value.strip() else value)
    except ValueError as error:
        raise ExpressionError(f'invalid operation: float("{value}")') from error


def _len(value: Value) -> int:
    if not isinstance(value, str | list | Mapping):
        raise ExpressionError(f"invalid argument for len: {_shown(value)}")
    return len(value)


def _to_json(value: Value) -> str:
    try:
        return go_json(value)
    except ValueError as error:
        raise ExpressionError(f"toJson: {error}") from error


_FUNCTIONS: dict[str, Callable[[Value], Value]] = {
    "asInt": _int,
    "int": _int,
    "asFloat": _float,
    "float": _float,
    "string": go_string,
    "toJson": _to_json,
    "len": _len,
}
