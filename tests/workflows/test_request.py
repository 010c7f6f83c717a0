"""Run requests: what a commit asks for, under a name that says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from colchis.components.config import RunConfig, from_parameters, load, parse
from colchis.components.errors import BadConfig
from colchis.workflows.cli import main
from colchis.workflows.lint import lint_files
from colchis.workflows.render import TEMPLATES, to_yaml
from colchis.workflows.request import default_name, request

DOCUMENT = {
    "model": {"source": f"input:{'a' * 64}"},
    "environment": {"kind": "reasoning_gym", "task": "chain_sum", "prompt_template": "{prompt} \n=no: 'x'"},
    "trainer": {"learning_rate": 0.00001},
}


def build(name: str = "sums", pool: str = "main", **sections: object) -> dict:
    return request(parse({**DOCUMENT, **sections}), name=name, pool=pool, shape="cpu")


def asked(document: dict) -> RunConfig:
    """The configuration as `begin` reads it from a request that went through YAML."""
    again = yaml.safe_load(to_yaml(document))
    values = {p["name"]: p["value"] for p in again["spec"]["arguments"]["parameters"]}
    return from_parameters({k: v for k, v in values.items() if k not in ("run", "pool")})


def test_a_request_carries_the_configuration_unchanged() -> None:
    """Fault: YAML that turns 1e-05 into text, or a line break into a blank, and so starts another run."""
    assert asked(build()) == parse(DOCUMENT)


def test_name_and_run_are_the_content() -> None:
    """Fault: a changed request that GitOps takes for the old one, or the same one started twice."""
    first = build()
    name = first["metadata"]["name"]
    assert {"name": "run", "value": name} in first["spec"]["arguments"]["parameters"]
    assert build()["metadata"]["name"] == name
    others = (build(pool="other"), build(trainer={"learning_rate": 0.1}), build(loop={"iterations": 7}))
    assert len({name, *(o["metadata"]["name"] for o in others)}) == 4


def test_a_request_is_a_reference_and_arguments(tmp_path: Path) -> None:
    """Fault: a field that a controller in Strict mode refuses, or one that lets a commit end a run."""
    document = build()
    assert set(document["spec"]) == {"workflowTemplateRef", "arguments"}
    assert document["metadata"]["annotations"]["kustomize.toolkit.fluxcd.io/prune"] == "disabled"
    assert document["metadata"]["annotations"]["argocd.argoproj.io/sync-options"] == "Prune=false"
    path = tmp_path / "request.yaml"
    path.write_text(to_yaml(document))
    assert lint_files([path, *sorted(TEMPLATES.glob("*.yaml"))]) == []


@pytest.mark.parametrize("name", ["", "Sums", "-sums", "s" * 34, "a.b"])
def test_names_that_cannot_be_a_run(name: str) -> None:
    with pytest.raises(BadConfig, match="at most 33"):
        build(name=name)


def test_a_file_of_this_machine_is_refused() -> None:
    """Fault: a request that can never start, found out by a pod."""
    with pytest.raises(BadConfig, match=r"model\.source: 'file:base' is a file of this machine; set the COLCHIS_S3_\*"):
        build(model={"source": "file:base"})


def test_the_command_writes_one_file_named_like_the_run(tmp_path: Path) -> None:
    config = tmp_path / "sums.yaml"
    config.write_text(yaml.safe_dump(DOCUMENT))
    done = CliRunner().invoke(main, ["request", str(config), "--run", "sums", "--to", str(tmp_path / "runs")])
    assert done.exit_code == 0, done.output
    (path,) = (tmp_path / "runs").iterdir()
    document = yaml.safe_load(path.read_text())
    assert path.stem == document["metadata"]["name"]
    assert document == request(load(config, []), name="sums", pool="main", shape="cpu")


@pytest.mark.parametrize(
    ("path", "name"), [("a/My Sums.yaml", "my-sums"), ("first/run.yaml", "first"), ("a/--.yaml", "run")]
)
def test_default_names(path: str, name: str) -> None:
    assert default_name(Path(path)) == name
