"""`when` conditions: the accepted subset of govaluate, evaluated on text whose tags are already substituted.

Argo hands the substituted text to govaluate and reads bare words as strings: `stop == go` compares two strings, and
`my-value == go` is an error (a minus between two words). Numbers are floats; `==` between a number and a string is
false; `<` needs two numbers or two strings; `&&` and `||` need booleans.

>>> holds("3 == 3.0 && go != stop")
True
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

Value = str | float | bool | tuple["Value", ...]


class ConditionError(ValueError):
    """A `when` that is malformed, outside the accepted subset, or not a boolean; reads like the controller's error."""


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    value: Value = ""


_TOKEN = re.compile(
    r"""\s*(?:
        (?P<number>\d[\d.]*)
      | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<word>[^\W\d][\w.]*)
      | \[(?P<bracket>[^\]]*)\]
      | (?P<operator>=~|!~|==|!=|<=|>=|&&|\|\||[-+*/%<>!(),?:])
    )""",
    re.VERBOSE,
)
_ORDER = [["||"], ["&&"], ["==", "!=", "<", "<=", ">", ">=", "=~", "!~", "in"], ["+", "-"], ["*", "/", "%"]]


def holds(when: str) -> bool:
    """Whether a substituted `when` is true; an empty one is. Raises ConditionError."""
    if not when:
        return True
    value = _Condition(when).whole()
    if not isinstance(value, bool):
        raise ConditionError(f"Expected boolean evaluation for '{when}'. Got {value}")
    return value


class _Condition:
    def __init__(self, source: str) -> None:
        self.source = source
        self.tokens = self.tokenize(source)
        self.at = 0

    def tokenize(self, source: str) -> list[_Token]:
        tokens, position = [], 0
        while source[position:].strip():
            match = _TOKEN.match(source, position)
            if match is None:
                raise self.malformed(
                    f"Invalid token: '{source[position:].split()[0]}'",
                    hint=' (hint: try wrapping the affected expression in quotes ("))',
                )
            kind, text = match.lastgroup or "", match.group(match.lastgroup or 0)
            if kind == "number":
                try:
                    tokens.append(_Token("value", text, float(text)))
                except ValueError as error:
                    raise self.malformed(f"Unable to parse numeric value '{text}'") from error
            elif kind == "string":
                tokens.append(_Token("value", text, re.sub(r"\\(.)", r"\1", text[1:-1])))
            elif kind == "word" and text in ("true", "false"):
                tokens.append(_Token("value", text, text == "true"))
            elif kind == "word" and text in ("in", "IN"):
                tokens.append(_Token("operator", "in"))
            elif kind in ("word", "bracket"):
                tokens.append(_Token("value", text, text))
            else:
                tokens.append(_Token("operator", text))
            position = match.end()
        return [*tokens, _Token("end", "")]

    def malformed(self, reason: str, hint: str = "") -> ConditionError:
        return ConditionError(f"Invalid 'when' expression '{self.source}': {reason}{hint}")

    def failed(self, reason: str) -> ConditionError:
        return ConditionError(f"Failed to evaluate 'when' expresion '{self.source}': {reason}")

    def operator(self, *texts: str) -> str | None:
        token = self.tokens[self.at]
        if token.kind == "operator" and token.text in texts:
            self.at += 1
            return token.text
        return None

    def whole(self) -> Value:
        value = self.ternary()
        if self.tokens[self.at].kind != "end":
            raise self.malformed(f"Cannot transition token types near '{self.tokens[self.at].text}'")
        return value

    def ternary(self) -> Value:
        condition = self.level(0)
        if self.operator("?") is None:
            return condition
        then = self.level(0)
        if self.operator(":") is None:
            raise self.malformed("'?' without ':'")
        otherwise = self.ternary()
        return then if self.boolean("?", condition) else otherwise

    def level(self, depth: int) -> Value:
        if depth == len(_ORDER):
            return self.unary()
        value = self.level(depth + 1)
        while (operator := self.operator(*_ORDER[depth])) is not None:
            value = self.apply(operator, value, self.level(depth + 1))
        return value

    def unary(self) -> Value:
        if self.operator("!"):
            return not self.boolean("!", self.unary())
        if self.operator("-"):
            value = self.unary()
            if isinstance(value, bool) or not isinstance(value, float):
                raise self.failed(f"Value '{value}' cannot be used with the unary prefix '-', it is not a number")
            return -value
        token = self.tokens[self.at]
        self.at += 1
        if token.kind == "value":
            return token.value
        if token.text == "(":
            values = [self.ternary()]
            while self.operator(","):
                values.append(self.ternary())
            if self.operator(")") is None:
                raise self.malformed("Unbalanced parenthesis")
            return tuple(values) if len(values) > 1 else values[0]
        raise self.malformed(
            "Unexpected end of expression"
            if token.kind == "end"
            else f"Cannot transition token types near '{token.text}'"
        )

    def boolean(self, operator: str, value: Value) -> bool:
        if not isinstance(value, bool):
            raise self.failed(
                f"Value '{value}' cannot be used with the logical operator '{operator}', it is not a bool"
            )
        return value

    def apply(self, operator: str, left: Value, right: Value) -> Value:
        if operator == "&&":
            return self.boolean(operator, left) & self.boolean(operator, right)
        if operator == "||":
            return self.boolean(operator, left) | self.boolean(operator, right)
        if operator in ("==", "!="):
            return (type(left) is type(right) and left == right) == (operator == "==")
        if operator == "in":
            if not isinstance(right, tuple):
                raise self.failed(f"Value '{right}' cannot be used with the 'in' operator, it is not an array")
            return any(type(left) is type(item) and left == item for item in right)
        if operator in ("=~", "!~"):
            try:
                return bool(re.search(str(right), str(left))) == (operator == "=~")
            except re.error as error:
                raise self.failed(f"Unable to compile regexp pattern '{right}': {error}") from error
        if isinstance(left, str) and isinstance(right, str):
            text: dict[str, Callable[[str, str], Value]] = {
                "+": lambda a, b: a + b,
                "<": lambda a, b: a < b,
                "<=": lambda a, b: a <= b,
                ">": lambda a, b: a > b,
                ">=": lambda a, b: a >= b,
            }
            if operator in text:
                return text[operator](left, right)
        if operator == "+" and (isinstance(left, str) or isinstance(right, str)):
            return f"{left}{right}"
        if not (type(left) is float and type(right) is float):
            raise self.failed(f"Value '{left}' and '{right}' cannot be used with the operator '{operator}'")
        numbers: dict[str, Callable[[float, float], Value]] = {
            "+": lambda a, b: a + b,
            "-": lambda a, b: a - b,
            "*": lambda a, b: a * b,
            "/": lambda a, b: a / b if b else float("inf"),
            "%": lambda a, b: a % b if b else float("nan"),
            "<": lambda a, b: a < b,
            "<=": lambda a, b: a <= b,
            ">": lambda a, b: a > b,
            ">=": lambda a, b: a >= b,
        }
        return numbers[operator](left, right)
