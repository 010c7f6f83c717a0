"""Rendered manifests: in step with their source, quoted, and locked down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from colchis.components.config import SECTIONS
from colchis.components.errors import BadConfig
from colchis.workflows import render
from colchis.workflows.lint import lint_files
from colchis.workflows.local.expressions import evaluate
from colchis.workflows.templates import Shape


@pytest.fixture(scope="module")
def rendered() -> dict[str, dict[str, Any]]:
    return {name: yaml.safe_load(text) for name, text in render.render().items()}


def pods(template: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for t in template["spec"]["templates"]:
        if "container" in t:
            yield t["container"]
        yield from t.get("containerSet", {}).get("containers", [])


def test_files_are_as_rendered() -> None:
    """Fault: a change of workflows/*.py that a cluster never sees."""
    assert render.drift() == ""


def test_drift_is_found(tmp_path: Path) -> None:
    """Fault: a check that cannot fail: an edited, a missing and a stale file are all drift."""
    render.write(tmp_path)
    assert render.drift(tmp_path) == ""
    first, second = sorted(tmp_path.glob("*.yaml"))[:2]
    first.write_text(first.read_text().replace("rollout", "rolout"))
    assert "rolout" in render.drift(tmp_path)
    render.write(tmp_path)
    second.unlink()
    assert second.name in render.drift(tmp_path)
    render.write(tmp_path)
    (tmp_path / "colchis-old-cpu.yaml").write_text("kind: WorkflowTemplate\n")
    assert "colchis-old-cpu.yaml" in render.drift(tmp_path)


def test_rendered_files_pass_the_lint() -> None:
    assert [str(f) for f in lint_files(sorted(render.TEMPLATES.glob("*.yaml")))] == []


def test_a_reload_that_sends_has_the_image_that_can() -> None:
    """Fault: a run that fails at its first reload, for want of torch; and a misspelled word that means `stage`."""
    for word, image in (("stage", "colchis/stage"), ("trainer", "colchis/trainer")):
        (text,) = render.render([Shape("x", reload_from=word)]).values()  # type: ignore[arg-type]
        (reload,) = [t for t in yaml.safe_load(text)["spec"]["templates"] if "containerSet" in t]
        assert {c["image"].split(":")[0] for c in reload["containerSet"]["containers"]} == {image}
        assert "nvidia.com/gpu" not in text
    gpu = Shape("x", reload_from="trainer", trainer_gpus=8, node_selector={"gpu": "yes"})
    (text,) = render.render([gpu]).values()
    (reload,) = [t for t in yaml.safe_load(text)["spec"]["templates"] if "containerSet" in t]
    asked = {c["name"]: c["resources"]["limits"].get("nvidia.com/gpu") for c in reload["containerSet"]["containers"]}
    assert asked == {"a-store": None, "b-transfer": None, "c-buffer": None, "d-load": "1", "main": None}
    assert reload["nodeSelector"] == {"gpu": "yes"}
    with pytest.raises(BadConfig, match="reload_from is 'triner', expected stage or trainer"):
        Shape("x", reload_from="triner")  # type: ignore[arg-type]


def test_every_pod_is_restricted(rendered: dict[str, dict[str, Any]]) -> None:
    """Fault: a stage that Pod Security `restricted` would refuse, or that could write to its image."""
    for template in rendered.values():
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert template["spec"]["automountServiceAccountToken"] is False
        found = list(pods(template))
        assert len(found) > 8
        for container in found:
            context = container["securityContext"]
            assert context["capabilities"]["drop"] == ["ALL"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert "memory" in container["resources"]["limits"]


def test_secrets_are_only_referred_to(rendered: dict[str, dict[str, Any]]) -> None:
    """Fault: a credential in an argument or a parameter, which Argo stores and shows."""
    for template in rendered.values():
        for container in pods(template):
            secret = [e for e in container["env"] if "KEY" in e["name"] or "TOKEN" in e["name"]]
            assert secret
            assert all("secretKeyRef" in e["valueFrom"] for e in secret)


def test_each_section_is_a_parameter(rendered: dict[str, dict[str, Any]]) -> None:
    """Fault: `argo submit --parameter-file run.yaml` dropping a section that has no parameter."""
    for template in rendered.values():
        names = {p["name"] for p in template["spec"]["arguments"]["parameters"]}
        assert names == {"run", "pool", "start", *SECTIONS}
        assert all(p.get("description") for p in template["spec"]["arguments"]["parameters"])


@pytest.mark.parametrize("value", ["n", "1e3", "0123", "yes", "null", "~", "1_000", "a: b", "{{x}}"])
def test_strings_stay_strings_for_yaml_1_1(value: str) -> None:
    """Fault: a bare `n` that kubectl turns into false, after which the controller may not start again."""
    assert yaml.safe_load(render.to_yaml({"key": value}))["key"] == value
    assert f'"{value}"' in render.to_yaml({"key": value})


def test_unknown_field_of_a_shape_is_named(tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text("gpus: 8\n")
    with pytest.raises(BadConfig, match=r"odd\.yaml.*gpus.*trainer_gpus"):
        render.read_shapes(tmp_path)


@pytest.mark.parametrize(
    ("code", "message", "again"),
    [
        (75, "main: Error (exit code 75)", True),
        (137, "main: OOMKilled (exit code 137)", True),
        (64, "a-store: Error (exit code 143)", True),
        (64, "b-transfer: Error (exit code 2)", True),
        (64, 'c-buffer: Error (exit code 64): dependency "b-transfer" exited with non-zero code: 143', False),
        (64, "d-load: Error (exit code 64): context canceled", True),
        (64, "Pod was terminated in response to imminent node shutdown.", True),
        (64, "The node was low on resource: ephemeral-storage.", True),
        (64, "Pod was active on the node longer than the specified deadline", False),
        (143, "c-buffer: Error (exit code 65)", False),
        (143, "Preempted in order to admit critical pod", True),
        (64, "a-store: Error (exit code 65): it says (exit code 75)", False),
        (65, "main: Error (exit code 65): a grader ended with (exit code 137)", False),
        (70, "main: Error (exit code 70)", False),
    ],
)
def test_what_is_tried_again(code: int, message: str, *, again: bool, rendered: dict[str, dict[str, Any]]) -> None:
    """Fault: a pod that was taken away and counts as refused, or one that refused and is tried five times."""
    (reload,) = [t for t in rendered["colchis-sync-cpu.yaml"]["spec"]["templates"] if "containerSet" in t]
    last = {"exitCode": str(code), "message": message, "status": "Failed", "duration": "3"}
    scope = {f"lastRetry.{name}": value for name, value in last.items()}
    assert evaluate(reload["retryStrategy"]["expression"], scope) is again
    assert list(reload["containerSet"]["containers"]) == sorted(
        reload["containerSet"]["containers"], key=lambda container: container["name"]
    ), "the message of the pod is that of the first one by name"


def test_no_retry_ends_with_the_time_that_the_stage_itself_takes(rendered: dict[str, dict[str, Any]]) -> None:
    """Fault: `maxDuration` counts from the first attempt's start and is the deadline of the next one too, so that a stage that
    had run longer was not tried again when its node was drained."""
    for template in rendered.values():
        for t in template["spec"]["templates"]:
            assert "maxDuration" not in t.get("retryStrategy", {}).get("backoff", {}), t["name"]
