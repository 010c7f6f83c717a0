"""Expressions and conditions against independent evaluations: Python's own arithmetic, and rules of Argo."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colchis.workflows.local.conditions import ConditionError, holds
from colchis.workflows.local.expression_tree import ExpressionError, names, parse
from colchis.workflows.local.expressions import evaluate
from colchis.workflows.local.gotext import go_json, go_string
from colchis.workflows.local.substitution import SubstitutionError, substitute

NUMBERS = st.integers(0, 50).map(str)
ARITHMETIC = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(" ".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-({text})"),
    ),
    max_leaves=12,
)
LOGIC = st.recursive(
    st.one_of(
        st.sampled_from(["true", "false"]),
        st.tuples(NUMBERS, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), NUMBERS).map(" ".join),
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(" ".join),
        inner.map(lambda text: f"not ({text})"),
        inner.map(lambda text: f"({text})"),
    ),
    max_leaves=10,
)
PLAIN = {"true": True, "false": False}


def in_python(text: str) -> Any:
    """The same text read by Python, which has these operators with the same precedence."""
    return eval(text, {"__builtins__": {}}, PLAIN)


@given(ARITHMETIC)
def test_arithmetic_is_that_of_integers(text: str) -> None:
    """Catches a wrong precedence or associativity."""
    assert evaluate(text, {}) == in_python(text)


@given(LOGIC)
def test_logic_and_comparisons(text: str) -> None:
    assert evaluate(text, {}) is in_python(text)
    symbols = text.replace(" and ", " && ").replace(" or ", " || ").replace("not ", "!")
    assert evaluate(symbols, {}) is in_python(text)
    assert holds(symbols) is in_python(text)


@given(st.text(max_size=30))
def test_any_text_is_either_a_value_or_an_error_of_its_own_kind(text: str) -> None:
    """Catches a crash of the parser on what a user may write."""
    for read, error in ((lambda: evaluate(text, {"a.b": "1"}), ExpressionError), (lambda: holds(text), ConditionError)):
        try:
            read()
        except error:
            continue


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_strings_survive_quoting(text: str) -> None:
    """Catches an escape that is read differently from how JSON writes it."""
    assert evaluate(json.dumps(text), {}) == text
    assert evaluate("a.b + ''", {"a.b": text}) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_printed_so_that_they_read_back(value: float) -> None:
    assert float(go_json(value)) == value
    assert float(go_string(value)) == value
    assert evaluate("asFloat(x.y)", {"x.y": go_string(value)}) == value


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x, max_size=4)))
def test_json_reads_back(value: Any) -> None:
    assert json.loads(go_json(value)) == value


@given(st.integers(-100, 100), st.integers(-100, 100).filter(bool))
def test_remainder_has_the_sign_of_the_dividend(a: int, b: int) -> None:
    """Catches Python's remainder, which differs from Go's for negative numbers."""
    assert evaluate(f"({a}) % ({b})", {}) == int(math.fmod(a, b))


@given(st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True), st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True))
@settings(max_examples=50)
def test_when_compares_bare_words_as_text(a: str, b: str) -> None:
    reserved = {"true", "false", "in"}
    if not {a, b} & reserved:
        assert holds(f"{a} == {b}") is (a == b)
        assert holds(f"'{a}' != \"{b}\"") is (a != b)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("asInt(inputs.parameters.i) + 1 < 9", True),
        ("lastRetry.status == 'Error' or (asInt(lastRetry.exitCode) in [75, 137, 143])", True),
        ("lastRetry.message matches 'node .*shutdown'", True),
        ("inputs.parameters['with-dash']", "x"),
        ("steps.off ?? 'none'", "none"),
        ("steps.off?.outputs.deep ?? 'none'", "none"),
        ("asInt(inputs.parameters.i) == 3 ? 'a' : 'b'", "a"),
        ("false ? 1 : true ? 2 : 3", 2),
        ("10 / 4", 2.5),
        ("10 / 5", 2.0),
        ("1 in [1.0]", True),
        ("'1' in ['1']", True),
        ("'1' not in [1]", True),
        ("inputs.parameters.i == 3", False),
        ("string(1.0) + string(true)", "1true"),
        ("toJson([1.5, 'a<b'])", '[1.5,"a\\u003cb"]'),
        ("string(0.00001)", "1e-05"),
        ("toJson(0.00001)", "0.00001"),
        ("[1, 2, 3][-1]", 3),
        ("not true == false", True),
        ("`raw \\n`", "raw \\n"),
        ("'\\u00e9\\t'", "\u00e9\t"),
    ],
)
def test_values(text: str, value: Any) -> None:
    variables = {
        "inputs.parameters.i": "3",
        "inputs.parameters.with-dash": "x",
        "lastRetry.status": "Failed",
        "lastRetry.exitCode": "75",
        "lastRetry.message": "imminent node was shutdown",
        "steps.on": "x",
    }
    result = evaluate(text, variables)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("inputs.parameters.i + 1", "invalid operation"),
        ("'a' + 1", "mismatched types"),
        ("1 == 'a'", "mismatched types"),
        ("int('1') == '1'", "mismatched types"),
        ("asInt('x')", "int"),
        ("asInt('1.5')", "int"),
        ("unknown.name", "unknown name"),
        ("inputs.parameters.i.deeper", "cannot fetch"),
        ("steps.off.outputs ?? 'none'", "cannot fetch outputs from <nil>"),
        ("'\\ud800'", "bad escape"),
        ("sprig.trim('x')", "method calls"),
        ("trim('x')", "not accepted"),
        ("{'a': 1}", "unexpected"),
        ("1 +", "unexpected"),
        ("(1", "expected"),
        ("1 ? 2 : 3", "boolean"),
        ("1.5 % 2", "mismatched types"),
        ("1 % 0", "divide by zero"),
        ("[1][5]", "out of range"),
        ("'a' matches '('", "pattern"),
        ("__import__('os')", "not accepted"),
        ("let x = 1; x", "unexpected"),
        ("1 | 2", "unexpected character"),
    ],
)
def test_errors(text: str, reason: str) -> None:
    """Catches an expression that a controller refuses, or that is outside the subset, and that gets a value here."""
    with pytest.raises(ExpressionError, match=reason.replace("(", r"\(")):
        evaluate(text, {"inputs.parameters.i": "3", "steps.on": "x"})


@pytest.mark.parametrize(
    ("when", "result"),
    [
        ("", True),
        ("go == go", True),
        ("3 == 3.0", True),
        ("3 == '3'", False),
        ("a in (a, b) && !(c in (a, b))", True),
        ("2 + 3 * 2 == 8", True),
        ("abc =~ '^a.c$'", True),
        ("true || false", True),
        ("b > a", True),
        ('["p","q"] != other', True),
        ("1 > 0 ? true : false", True),
    ],
)
def test_conditions(when: str, result: bool) -> None:
    assert holds(when) is result


@pytest.mark.parametrize(
    ("when", "reason"),
    [
        ("on-policy == on-policy", "cannot be used with the operator '-'"),
        (" == go", "Invalid 'when' expression"),
        ("go ==", "Invalid 'when' expression"),
        ("a && b", "logical operator"),
        ("1 < a", "cannot be used"),
        ("go", "Expected boolean"),
        ("a b", "Cannot transition"),
        ("(a == b", "Unbalanced"),
        ("a == #", "Invalid token"),
    ],
)
def test_bad_conditions(when: str, reason: str) -> None:
    with pytest.raises(ConditionError, match=reason):
        holds(when)


def test_tags_are_substituted_everywhere_and_once() -> None:
    scope = {"a.b": "1", "c": "{{a.b}}"}
    assert substitute({"x": ["{{a.b}}-{{ a.b }}", "{{=asInt(a.b) + 1}}"], "y": 3}, scope) == {"x": ["1-1", "2"], "y": 3}
    with pytest.raises(SubstitutionError, match="substitute again"):
        substitute("{{c}}", scope)
    for missing in ("{{nothing}}", "{{=nothing}}", "{{=a.nothing}}"):
        with pytest.raises(SubstitutionError, match="failed to"):
            substitute(missing, scope)


def test_names_are_found_without_values() -> None:
    assert names(parse("asInt(a.b) in [c['d'], 1] ? e : f ?? -g.h")) == {"a.b", "c.d", "e", "f", "g.h"}
