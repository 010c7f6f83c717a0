"""The parser of the accepted subset of expr-lang: text to tree, with the type errors that expr-lang's checker reports."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

Static = Literal["int", "float", "string", "bool", "list", "nil", "any"]
Value = Any


class ExpressionError(ValueError):
    """An expression that is malformed, outside the accepted subset, or that fails on the given values."""


@dataclass(frozen=True)
class Token:
    kind: Literal["number", "string", "name", "operator", "end"]
    text: str
    value: Value = None


_TOKEN = re.compile(
    r"""\s*(?:
        (?P<number>(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`[^`]*`)
      | (?P<name>[A-Za-z_$][A-Za-z0-9_$]*)
      | (?P<operator>\?\?|\?\.|\|\||&&|==|!=|<=|>=|\*\*|[-+*/%<>!?:.,()\[\]])
    )""",
    re.VERBOSE,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


def tokenize(source: str) -> list[Token]:
    tokens: list[Token] = []
    position = 0
    while source[position:].strip():
        match = _TOKEN.match(source, position)
        if match is None:
            raise ExpressionError(f"unexpected character {source[position:].lstrip()[0]!r} in {source!r}")
        text = match.group().strip() if match.lastgroup != "string" else match.group("string")
        if match.lastgroup == "number":
            plain = text.replace("_", "")
            tokens.append(Token("number", text, int(plain) if plain.isdigit() else float(plain)))
        elif match.lastgroup == "string":
            tokens.append(Token("string", text, _unquote(text)))
        elif match.lastgroup == "name":
            tokens.append(Token("name", text))
        else:
            tokens.append(Token("operator", text))
        position = match.end()
    return [*tokens, Token("end", "end of expression")]


def _unquote(text: str) -> str:
    if text[0] == "`":
        return text[1:-1]

    def replace(match: re.Match[str]) -> str:
        code = match.group(1)
        if code[0] in "uxU":
            return chr(int(code[1:], 16))
        if code not in _ESCAPES:
            raise ExpressionError(f"unknown escape \\{code} in {text}")
        return _ESCAPES[code]

    try:
        plain = re.sub(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", replace, text[1:-1])
        return plain.encode("utf-16", "surrogatepass").decode("utf-16")  # two escapes may be one character
    except (UnicodeError, ValueError) as error:
        raise ExpressionError(f"bad escape in {text}") from error


# The tree. `static` is the type that expr-lang's checker would know before the values are there.


@dataclass(frozen=True)
class Constant:
    value: Value
    static: Static


@dataclass(frozen=True)
class Name:
    name: str
    static: Static = "any"


@dataclass(frozen=True)
class Member:
    of: Tree
    key: Tree
    optional: bool
    static: Static = "any"


@dataclass(frozen=True)
class Chain:
    """A path with `?.` in it: nil as a whole when what stands before a `?.` is nil."""

    path: Tree
    static: Static = "any"


@dataclass(frozen=True)
class Call:
    function: str
    arguments: tuple[Tree, ...]
    static: Static


@dataclass(frozen=True)
class Unary:
    operator: str
    operand: Tree
    static: Static


@dataclass(frozen=True)
class Binary:
    operator: str
    left: Tree
    right: Tree
    static: Static


@dataclass(frozen=True)
class Conditional:
    condition: Tree
    then: Tree
    otherwise: Tree
    static: Static = "any"


@dataclass(frozen=True)
class ListOf:
    items: tuple[Tree, ...]
    static: Static = "list"


Tree = Constant | Name | Member | Chain | Call | Unary | Binary | Conditional | ListOf

_BINARY = {
    "or": 10,
    "||": 10,
    "and": 15,
    "&&": 15,
    **dict.fromkeys(["==", "!=", "<", ">", "<=", ">=", "in", "not in", "contains", "startsWith", "endsWith"], 20),
    "matches": 20,
    "+": 30,
    "-": 30,
    "*": 60,
    "/": 60,
    "%": 60,
    "??": 500,
}
_UNARY = {"not": 50, "!": 50, "-": 90, "+": 90}
_WORDS = {"or", "and", "in", "not", "contains", "startsWith", "endsWith", "matches"}
_RETURNS: dict[str, Static] = {
    "asInt": "any",
    "asFloat": "any",
    "int": "int",
    "float": "float",
    "string": "string",
    "toJson": "string",
    "len": "int",
}
_COMPARISONS = {"==", "!=", "<", ">", "<=", ">="}
_NUMBERS = {"int", "float"}


def parse(source: str) -> Tree:
    """The tree of an expression; raises ExpressionError, also for what is valid expr-lang but not accepted here."""
    return _Parser(source).whole()


class _Parser:
    def __init__(self, source: str) -> None:
        self.source = source
        self.tokens = tokenize(source)
        self.at = 0

    @property
    def now(self) -> Token:
        return self.tokens[self.at]

    def is_operator(self, text: str) -> bool:
        return self.now.text == text and self.now.kind in ("operator", "name")

    def take(self) -> Token:
        token = self.now
        self.at += 1
        return token

    def expect(self, text: str) -> None:
        if not self.is_operator(text):
            raise ExpressionError(f"expected {text!r}, found {self.now.text!r} in {self.source!r}")
        self.at += 1

    def whole(self) -> Tree:
        tree = self.expression(0)
        if self.now.kind != "end":
            raise ExpressionError(f"unexpected {self.now.text!r} in {self.source!r}")
        return tree

    def binary_operator(self) -> str | None:
        token = self.now
        if token.kind == "operator" or (token.kind == "name" and token.text in _WORDS):
            if token.text == "not" and self.tokens[self.at + 1].text == "in":
                return "not in"
            if token.text in _BINARY:
                return token.text
        return None

    def expression(self, precedence: int) -> Tree:
        left = self.unary()
        while (operator := self.binary_operator()) is not None and _BINARY[operator] >= precedence:
            self.at += 2 if operator == "not in" else 1
            right = self.expression(_BINARY[operator] + 1)
            left = self.joined(operator, left, right)
        if precedence == 0 and self.is_operator("?"):
            self.at += 1
            then = self.expression(0)
            self.expect(":")
            otherwise = self.expression(0)
            self.need_bool("?:", left)
            static: Static = then.static if then.static == otherwise.static else "any"
            return Conditional(left, then, otherwise, static)
        return left

    def unary(self) -> Tree:
        token = self.now
        if (token.kind == "operator" or token.text == "not") and token.text in _UNARY and token.kind != "string":
            self.at += 1
            operand = self.expression(_UNARY[token.text])
            if token.text in ("not", "!"):
                self.need_bool(token.text, operand)
                return Unary("not", operand, "bool")
            if operand.static not in ("int", "float", "any"):
                raise ExpressionError(f"invalid operation: {token.text} (mismatched type {operand.static})")
            return Unary(token.text, operand, operand.static)
        return self.postfix(self.primary())

    def primary(self) -> Tree:
        token = self.take()
        if token.kind == "number":
            return Constant(token.value, "int" if isinstance(token.value, int) else "float")
        if token.kind == "string":
            return Constant(token.value, "string")
        if token.kind == "name":
            if token.text in ("true", "false"):
                return Constant(token.text == "true", "bool")
            if token.text == "nil":
                return Constant(None, "nil")
            if self.is_operator("("):
                return self.call(token.text)
            if token.text in _WORDS:
                raise ExpressionError(f"unexpected {token.text!r} in {self.source!r}")
            return Name(token.text)
        if token.text == "(":
            tree = self.expression(0)
            self.expect(")")
            return tree
        if token.text == "[":
            return ListOf(self.items("]"))
        raise ExpressionError(f"unexpected {token.text!r} in {self.source!r}")

    def items(self, closing: str) -> tuple[Tree, ...]:
        items: list[Tree] = []
        while not self.is_operator(closing):
            items.append(self.expression(0))
            if not self.is_operator(closing):
                self.expect(",")
        self.at += 1
        return tuple(items)

    def call(self, function: str) -> Tree:
        self.expect("(")
        arguments = self.items(")")
        if function not in _RETURNS:
            accepted = ", ".join(_RETURNS)
            raise ExpressionError(f"function {function!r} is not accepted (accepted: {accepted}) in {self.source!r}")
        if len(arguments) != 1:
            raise ExpressionError(f"{function} takes one argument, got {len(arguments)} in {self.source!r}")
        return Call(function, arguments, _RETURNS[function])

    def postfix(self, tree: Tree) -> Tree:
        chained = False
        while True:
            if self.is_operator(".") or self.is_operator("?."):
                optional = self.take().text == "?."
                chained |= optional
                name = self.take()
                if name.kind != "name":
                    raise ExpressionError(f"expected a name after '.', found {name.text!r} in {self.source!r}")
                if self.is_operator("("):
                    raise ExpressionError(f"method calls are not accepted: {name.text!r} in {self.source!r}")
                tree = Member(tree, Constant(name.text, "string"), optional)
            elif self.is_operator("["):
                self.at += 1
                key = self.expression(0)
                self.expect("]")
                tree = Member(tree, key, optional=False)
            else:
                return Chain(tree) if chained else tree

    def need_bool(self, operator: str, tree: Tree) -> None:
        if tree.static not in ("bool", "any"):
            raise ExpressionError(
                f"invalid operation: {operator} wants a boolean, not {tree.static}, in {self.source!r}"
            )

    def joined(self, operator: str, left: Tree, right: Tree) -> Tree:
        """A binary node, refused where expr-lang's checker refuses the types."""
        types = {left.static, right.static}
        known = "any" not in types
        mismatch = ExpressionError(
            f"invalid operation: {operator} (mismatched types {left.static} and {right.static}) in {self.source!r}"
        )
        if operator in ("or", "||", "and", "&&"):
            self.need_bool(operator, left)
            self.need_bool(operator, right)
            return Binary("or" if operator in ("or", "||") else "and", left, right, "bool")
        if operator in ("==", "!="):
            if known and len(types) > 1 and not types <= _NUMBERS and "nil" not in types:
                raise mismatch
            return Binary(operator, left, right, "bool")
        if operator in _COMPARISONS:
            allowed = {"int", "float", "any"} if types & _NUMBERS else {"string", "any"}
            if not types <= allowed:
                raise mismatch
            return Binary(operator, left, right, "bool")
        if operator in ("in", "not in"):
            if right.static not in ("list", "any"):
                raise mismatch
            return Binary(operator, left, right, "bool")
        if operator in ("contains", "startsWith", "endsWith", "matches"):
            if not types <= {"string", "any"}:
                raise mismatch
            return Binary(operator, left, right, "bool")
        if operator == "??":
            return Binary(operator, left, right, "any")
        allowed = {"string", "any"} if operator == "+" and "string" in types else {"int", "float", "any"}
        if not types <= allowed or (operator == "%" and "float" in types):
            raise mismatch
        static: Static = "float" if operator == "/" else (left.static if len(types) == 1 else "any")
        if known and types == _NUMBERS:
            static = "float"
        return Binary(operator, left, right, static)


def names(tree: Tree) -> set[str]:
    """Every dotted path that an expression reads, such as `inputs.parameters.x`."""
    match tree:
        case Name(name=name):
            return {name}
        case Member(of=of, key=Constant(value=str(key))):
            return {f"{path}.{key}" for path in names(of)}
        case Member(of=of, key=key):
            return names(of) | names(key)
        case Chain(path=path):
            return names(path)
        case Call(arguments=items) | ListOf(items=items):
            return set().union(*map(names, items))
        case Unary(operand=operand):
            return names(operand)
        case Binary(left=left, right=right):
            return names(left) | names(right)
        case Conditional(condition=condition, then=then, otherwise=otherwise):
            return names(condition) | names(then) | names(otherwise)
    return set()
