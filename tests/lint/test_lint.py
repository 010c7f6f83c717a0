"""Each rule of the lint, with one manifest that breaks it and nothing else: exactly one finding, at the right place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from colchis.components.errors import BadConfig
from colchis.workflows.documents import parse
from colchis.workflows.lint import DEPTH_BUDGET, SIZE_BUDGET_BYTES, Finding, lint, lint_files

HERE = Path(__file__).parent
GOOD = (HERE / "good.yaml").read_text()
RULES: list[dict[str, Any]] = yaml.safe_load((HERE / "rules.yaml").read_text())
Json = Any


def findings(text: str) -> list[Finding]:
    return lint(parse(text, "bad.yaml"))


class Quoting(yaml.SafeDumper):
    """Every string in quotes, nothing by reference."""

    def ignore_aliases(self, data: object) -> bool:
        return True


Quoting.add_representer(str, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"'))


class Manifest:
    """good.yaml, to be broken."""

    def __init__(self) -> None:
        self.documents: list[Json] = [unshared(d) for d in yaml.safe_load_all(GOOD)]

    @property
    def spec(self) -> Json:
        return self.documents[0]["spec"]

    def template(self, name: str) -> Json:
        return next(t for t in self.spec["templates"] if t["name"] == name)

    def at(self, path: str) -> Json:
        """`spec.a.0.b`, `run.a`, or `TEMPLATE.a`."""
        first, *keys = path.split(".")
        place = self.spec if first == "spec" else self.documents[1]["spec"] if first == "run" else self.template(first)
        for key in keys:
            place = place[int(key)] if isinstance(place, list) else place[key]
        return place

    def apply(self, change: dict[str, Json]) -> None:
        place = self.at(change["at"])
        if "set" in change:
            place.update(change["set"])
            for key in [k for k, v in place.items() if v is None]:
                del place[key]
        elif "remove" in change:
            del place[change["remove"]]
        elif "add" in change:
            place.append(change["add"])
        elif "repeat" in change:
            place.append(place[change["repeat"]])
        else:
            place.update(replaced(place, *change["replace"]))

    def text(self) -> str:
        return yaml.dump_all(self.documents, Dumper=Quoting, width=1000)


def unshared(value: Json) -> Json:
    if isinstance(value, dict):
        return {k: unshared(v) for k, v in value.items()}
    return [unshared(v) for v in value] if isinstance(value, list) else value


def replaced(value: Json, old: str, new: str) -> Json:
    if isinstance(value, dict):
        return {k: replaced(v, old, new) for k, v in value.items()}
    if isinstance(value, list):
        return [replaced(v, old, new) for v in value]
    return value.replace(old, new) if isinstance(value, str) else value


@pytest.fixture
def manifest() -> Manifest:
    return Manifest()


def test_a_good_manifest_has_no_findings(manifest: Manifest) -> None:
    """Catches a rule that refuses what is right: everything else here would be worth nothing."""
    assert findings(GOOD) == []
    assert findings(manifest.text()) == []


@pytest.mark.parametrize("case", RULES, ids=lambda case: case["rule"])
def test_rule(case: dict[str, Json], manifest: Manifest) -> None:
    """Catches a rule that is lost, that fires twice, or that points at the wrong template or field."""
    manifest.apply(case)
    found = findings(manifest.text())
    assert len(found) == 1, "\n".join(map(str, found))
    template, field, problem = case["found"]
    assert found[0].template == template
    assert field in found[0].field
    assert problem in found[0].problem
    assert str(found[0]).startswith("bad.yaml: ")


def recursive(manifest: Manifest) -> None:
    """A loop that calls itself until a `when` stops it."""
    arguments = {"parameters": [{"name": "count", "value": "0"}]}
    again = {"name": "again", "template": "window", "when": "{{inputs.parameters.count}} > 1", "arguments": arguments}
    manifest.template("window")["steps"].append([again])


def test_recursion_must_be_marked(manifest: Manifest) -> None:
    """Catches a cycle that is not seen, and a mark that nothing reads."""
    recursive(manifest)
    assert ["calls itself (window -> window)" in f.problem for f in findings(manifest.text())] == [True]
    manifest.template("window")["metadata"] = {"annotations": {"colchis.dev/recursion": "at most 9"}}
    assert findings(manifest.text()) == []


def test_a_manifest_that_is_too_deep_or_too_large_is_refused(manifest: Manifest) -> None:
    """Catches a template that a controller would give up on at run time."""
    for level in range(DEPTH_BUDGET):
        below = f"level-{level + 1}" if level + 1 < DEPTH_BUDGET else "proof"
        steps = [[{"name": "down", "template": below}]]
        manifest.spec["templates"].append({"name": f"level-{level}", "steps": steps})
    manifest.template("main")["steps"].append([{"name": "down", "template": "level-0"}])
    manifest.documents[0]["metadata"]["annotations"] = {"a": "x" * SIZE_BUDGET_BYTES}
    assert [f.field for f in findings(manifest.text())] == ["(document)", "spec.entrypoint"]


def test_a_default_for_a_skipped_output_is_enough(manifest: Manifest) -> None:
    """Catches a lint that refuses the two ways out: valueFrom.default, and ?? in an expression."""
    a, b, c = manifest.at("graph.dag.tasks")
    a["when"] = "'{{inputs.parameters.i}}' != '3'"
    b["arguments"]["parameters"][0]["value"] = "{{=tasks.a.outputs.parameters.count ?? '0'}}"
    c["when"] = "{{tasks.a.outputs.parameters.more}} == true"
    assert findings(manifest.text()) == []


MISREAD = ["n", "y", "on", "Off", "NO", "~", "0777", "0o7", "0x1F", "1_000", "12:30", "+5", ".5", "5.", "1e5"]


@pytest.mark.parametrize("value", [*MISREAD, "2026-01-02"])
def test_a_value_that_yaml_readers_take_differently_must_be_quoted(value: str) -> None:
    """Catches `name: n`, which kubectl turns into false and which once kept a controller from starting."""
    header = "apiVersion: v1\nkind: ConfigMap\ndata:\n  key: "
    assert [f.field for f in findings(f"{header}{value}\n")] == ["data.key"]
    assert findings(f'{header}"{value}"\n') == []


@pytest.mark.parametrize("value", ["true", "null", "12", "-3", "0", "0.25", "plain", "a-b", "v1.2.3", "1.2.3", "10Gi"])
def test_a_plain_value_may_stay_plain(value: str) -> None:
    """Catches a lint that asks for quotes where all readers agree."""
    assert findings(f"apiVersion: v1\nkind: ConfigMap\ndata:\n  key: {value}\n") == []


def test_keys_are_checked_too() -> None:
    """Catches `on:` as a key, which YAML 1.1 reads as true, and a field that stands twice, of which one is dropped."""
    found = findings("apiVersion: v1\nkind: ConfigMap\ndata:\n  on: a\n  key: a\n  key: b\n")
    assert [f.field for f in found] == ["data.on (the key)", "data.key"]


def test_files_that_cannot_be_read_or_parsed_are_named(tmp_path: Path) -> None:
    """Catches a lint that passes over what it could not read."""
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [1\n")
    assert [f.file for f in lint_files([tmp_path])] == [str(bad)]
    with pytest.raises(BadConfig, match=r"missing\.yaml"):
        lint_files([tmp_path / "missing.yaml"])


def test_the_manifests_of_this_repository_have_no_findings() -> None:
    """Catches drift: what the product renders must pass its own lint."""
    assert list(map(str, lint_files([HERE.parents[1] / "manifests"]))) == []
