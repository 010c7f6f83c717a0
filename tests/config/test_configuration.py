"""The configuration: overrides, parameters, identity, and a reference that says what the code says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colchis.components.config import RunConfig, from_parameters, load, override, parse, to_parameters
from colchis.components.config.reference import json_schema, markdown
from colchis.components.errors import BadConfig

MINIMAL = {"model": {"source": "file:base"}, "environment": {"kind": "reasoning_gym", "task": "chain_sum"}}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("model: {source: 'file:base'}\nenvironment: {kind: reasoning_gym, task: chain_sum}\n")
    return path


def test_parameters_carry_the_whole_configuration() -> None:
    """Fault: a section that a run request, the UI form or `argo submit` would silently lose."""
    config = parse(override(MINIMAL, ["algorithm.clip_high=0.28", "loop.seed=7", "trainer.learning_rate=3e-4"]))
    assert from_parameters(to_parameters(config)) == config


@given(rate=st.floats(1e-7, 1.0), seed=st.integers(0, 2**31 - 1))
def test_digest_depends_on_values_not_on_their_spelling(rate: float, seed: int) -> None:
    """Fault: Argo rewrites 1.0e-5 as 0.00001; a digest of the text would make it another run."""
    written = parse(override(MINIMAL, [f"trainer.learning_rate={rate!r}", f"loop.seed={seed}"]))
    rewritten = parse({**MINIMAL, "trainer": {"learning_rate": float(f"{rate:.17g}")}, "loop": {"seed": seed}})
    assert written.digest() == rewritten.digest()


def test_identity_holds_what_changes_results_and_nothing_else() -> None:
    """Fault: a resumed run that trains differently, or one that refuses to run longer."""
    base = parse(MINIMAL)
    longer = parse(override(MINIMAL, ["loop.iterations=500", "rollout.concurrency=8", "rollout.shards=2"]))
    other = parse(override(MINIMAL, ["rollout.temperature=0.9"]))
    assert longer.identity_digest() == base.identity_digest()
    assert other.identity_digest() != base.identity_digest()
    assert longer.digest() != base.digest()


def test_whole_versions_are_not_sent_where_adapters_are_served() -> None:
    """Fault: a transfer that is asked for, and silently not used."""
    asked = override(MINIMAL, ["trainer.lora_rank=4", "reload.transfer=gloo"])
    with pytest.raises(BadConfig, match=r"reload\.transfer: 'gloo' sends whole versions"):
        parse(asked)
    assert parse(override(asked, ["reload.adapters=merged"])).reload.transfer == "gloo"


def test_override_creates_sections_and_reads_numbers(config_file: Path) -> None:
    """Fault: `--set trainer.learning_rate=5e-4` arriving as text, since YAML 1.1 wants a dot."""
    config = load(config_file, ["trainer.learning_rate=5e-4", "rollout.stop=['x', 'y']"])
    assert config.trainer.learning_rate == 5e-4
    assert config.rollout.stop == ["x", "y"]


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("loop.iterations", "expected SECTION.FIELD=VALUE"),
        ("mode.deep=1", "'mode' is a value"),
        ("loop.seed=[", "not YAML"),
        ("grader.pattern=a: b", "YAML reads the value as a mapping; quote it"),
    ],
)
def test_malformed_override_is_named(assignment: str, words: str) -> None:
    document = {**MINIMAL, "mode": "sync"}
    with pytest.raises(BadConfig, match=words):
        override(document, [assignment])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {source: 'file:a'}\nmodel: {source: 'file:b'}\n", "occurs twice"),
        ("- a\n- b\n", "expected a mapping"),
        ("model: {source: [", "not YAML"),
    ],
)
def test_malformed_file_is_one_error(tmp_path: Path, text: str, words: str) -> None:
    """Fault: a repeated key whose first value is lost without a word."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(BadConfig, match=words):
        load(path)


def test_every_problem_is_reported_at_once() -> None:
    """Fault: fixing a file one error at a time."""
    with pytest.raises(BadConfig) as caught:
        parse({**MINIMAL, "rollout": {"promts": 3}, "algorithm": {"clip_low": 2}, "loop": {"window": 0}})
    message = str(caught.value)
    assert "rollout.promts: no such field; known: " in message
    assert "prompts" in message
    assert "algorithm.clip_low" in message
    assert "loop.window" in message


def test_reference_lists_every_field() -> None:
    """Fault: a field that a reader of docs/configuration.md cannot find."""
    text = markdown()
    for name, field in RunConfig.model_fields.items():
        assert f"## {name}" in text
        for inner in getattr(field.annotation, "model_fields", {}):
            assert f"`{inner}`" in text
    assert json_schema()["properties"].keys() == RunConfig.model_fields.keys()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "a: &x [1, 2]\nb: [*x, *x]\n",
            r"an alias \(\*name\) is not taken \[.*bad\.yaml, line 2\]; write the value out",
        ),
        ("[" * 5000 + "]" * 5000, r"nested deeper than 20 levels \[.*bad\.yaml, line 1\]"),
        ("a: 1\na: 2\n", r"key 'a' occurs twice \[.*bad\.yaml, line 2\]"),
    ],
)
def test_text_that_is_no_configuration_is_refused_by_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    """Fault: a few lines of YAML that take all memory or every stack frame, or a refusal that does not say where."""
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(BadConfig, match=said):
        load(path)


@pytest.mark.parametrize(
    "assignment",
    [
        f"loop.seed={2**31}",
        "environment.seed=18446744073709551616",
        "rollout.prompts=10000000",
        "reload.prepare_deadline_s=1e12",
        "trainer.learning_rate=1e30",
    ],
)
def test_numbers_that_no_library_takes_are_refused_at_once(config_file: Path, assignment: str) -> None:
    """Fault: a value that is valid here, and an internal error in a trainer an hour later."""
    field = assignment.partition("=")[0]
    with pytest.raises(BadConfig, match=rf"{field}.*less than or equal"):
        load(config_file, [assignment])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"environment": {"task": "gcd"}}, "environment.kind: is required: one of dataset, own, reasoning_gym"),
        ({"environment": {"kind": "gym", "task": "gcd"}}, "environment.kind: expected one of .*, found 'gym'"),
        ({"environment": "gcd"}, "environment"),
        ({"rollout": "many"}, "rollout: expected a mapping of fields, found 'many'"),
        ({"rollout": {"prompts": True}}, "rollout.prompts: expected a number, a text or a mapping, found true"),
        ({"rollout": {"prompts": "many"}}, "rollout.prompts: expected a valid integer.*, found 'many'"),
        ({"rollout": {"top_k": 0}}, "rollout.top_k: 0 leaves no token to sample; use -1"),
    ],
)
def test_what_stands_where_something_else_is_meant_is_named(change: dict[str, Any], said: str) -> None:
    """Fault: words of the library that checks, about its own types."""
    with pytest.raises(BadConfig, match=said) as caught:
        parse({**MINIMAL, **change})
    assert "Input" not in str(caught.value)
