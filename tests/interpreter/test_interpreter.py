"""The interpreter as the command line uses it: templates, environment, secrets, events, status, successors, limits."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from colchis.components.errors import BadConfig
from colchis.workflows.local.accepted import check, load_templates
from colchis.workflows.local.calls import Event, EventKind
from colchis.workflows.local.interpreter import WorkflowResult
from colchis.workflows.local.spec_check import check_spec
from tests.interpreter.machine import container, machine, workflow

WRITE = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
OUT = {"parameters": [{"name": "o", "valueFrom": {"path": "/tmp/o"}}]}


def run(work_dir: Path, manifest: dict[str, Any], **settings: Any) -> tuple[WorkflowResult, list[Event]]:
    async def go() -> tuple[WorkflowResult, list[Event]]:
        async with machine(work_dir, **settings) as (interpreter, events):
            return await asyncio.wait_for(interpreter.run(manifest), 60), events

    return asyncio.run(go())


def echo(text: str, **fields: Any) -> dict[str, Any]:
    """A template that writes `text`, with its tags resolved, to its output `o`."""
    return container(["python3", "-c", WRITE, "{{outputs.parameters.o.path}}", text], outputs=OUT, **fields)


def output(result: WorkflowResult, node: str = "w") -> str:
    nodes = {entry["name"]: entry for entry in result.nodes.values()}
    return str(nodes[node]["outputs"]["parameters"][0]["value"])


def test_a_workflow_may_set_what_its_template_leaves_open(tmp_path: Path) -> None:
    """Catches arguments of the run that don't win over the template's, and defaults that get lost."""
    template = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "WorkflowTemplate",
        "metadata": {"name": "base"},
        "spec": {
            "entrypoint": "main",
            "arguments": {"parameters": [{"name": "a", "value": "1"}, {"name": "b", "value": "2"}]},
            "templates": [echo("{{workflow.parameters.a}}{{workflow.parameters.b}}{{workflow.parameters.c}}")],
        },
    }
    arguments = {"parameters": [{"name": "b", "value": "B"}, {"name": "c", "value": "C"}]}
    manifest = {
        "kind": "Workflow",
        "metadata": {"name": "w"},
        "spec": {"workflowTemplateRef": {"name": "base"}, "arguments": arguments},
    }
    result, _ = run(tmp_path, manifest, templates={"base": template})
    assert output(result) == "1BC"
    with pytest.raises(BadConfig, match="no WorkflowTemplate 'base'; there are: other"):
        run(tmp_path, manifest, templates={"other": template})


def test_a_parameter_without_a_value_is_refused(tmp_path: Path) -> None:
    manifest = workflow(echo("x"), arguments={"parameters": [{"name": "needed"}]})
    with pytest.raises(BadConfig, match="'needed' has no value"):
        run(tmp_path, manifest)


def test_environment_of_the_run_wins_over_secrets_and_template(tmp_path: Path) -> None:
    """Catches a cluster address in a template that is used on a laptop, and a secret that is written to disk."""
    code = "import os, sys; open(sys.argv[1], 'w').write(' '.join(os.environ[n] for n in 'ABCDE'))"
    template = container(["python3", "-c", code, "{{outputs.parameters.o.path}}"], outputs=OUT)
    template["container"] |= {
        "envFrom": [{"secretRef": {"name": "all"}}, {"configMapRef": {"name": "absent", "optional": True}}],
        "env": [
            {"name": "A", "value": "dns://cluster"},
            {"name": "B", "valueFrom": {"secretKeyRef": {"name": "store-{{workflow.name}}", "key": "password"}}},
            {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
            {"name": "F", "valueFrom": {"configMapKeyRef": {"name": "none", "key": "none", "optional": True}}},
            {"name": "D", "value": "{{workflow.name}}"},
        ],
    }
    secrets = {"store-w": {"password": "hunter2"}, "all": {"E": "from-all", "D": "overridden"}}
    result, _ = run(tmp_path, workflow(template), environment={"A": "http://127.0.0.1"}, secrets=secrets)
    assert output(result) == "http://127.0.0.1 hunter2 local w from-all"
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "o"]
    assert written
    assert not any("hunter2" in path.read_text() for path in written if path.name not in ("status.json",))


def test_a_secret_that_is_not_there_is_named(tmp_path: Path) -> None:
    template = echo("x")
    reference = {"secretKeyRef": {"name": "store", "key": "password"}}
    template["container"]["env"] = [{"name": "P", "valueFrom": reference}]
    result, _ = run(tmp_path, workflow(template))
    assert result.phase == "Error"
    assert "store[password] for P" in result.message


def test_progress_and_states_are_reported_as_they_happen(tmp_path: Path) -> None:
    code = "import os, time; open(os.environ['ARGO_PROGRESS_FILE'], 'w').write('2/5'); time.sleep(1.5)"
    result, events = run(tmp_path, workflow(container(["python3", "-c", code], nodeSelector={"gpu": "yes"})))
    assert [event.kind for event in events] == [
        EventKind.IGNORED,
        EventKind.WORKFLOW_STARTED,
        EventKind.NODE_STARTED,
        EventKind.PROGRESS,
        EventKind.NODE_FINISHED,
        EventKind.WORKFLOW_FINISHED,
    ]
    assert events[0].message == "image, nodeSelector"
    assert events[3].message == "2/5"
    assert events[-1].phase == "Succeeded"
    assert result.nodes["w"]["progress"] == "2/5"


def test_status_file_has_the_shape_of_a_workflows_status(tmp_path: Path) -> None:
    """Catches a reporter that has to know where a status came from."""
    steps = {
        "name": "main",
        "steps": [
            [{"name": "say", "template": "say", "arguments": {"parameters": [{"name": "t", "value": "hi"}]}}],
        ],
    }
    say = {**echo("{{inputs.parameters.t}}", inputs={"parameters": [{"name": "t"}]}), "name": "say"}
    result, _ = run(tmp_path, workflow(steps, say))
    document = json.loads((tmp_path / "w" / "status.json").read_text())
    assert document["metadata"]["name"] == "w"
    status = document["status"]
    assert status["phase"] == "Succeeded"
    assert status["nodes"] == json.loads(json.dumps(result.nodes))
    root, group = status["nodes"]["w"], status["nodes"][status["nodes"]["w"]["children"][0]]
    leaf = status["nodes"][group["children"][0]]
    assert (root["type"], group["type"], leaf["type"]) == ("Steps", "StepGroup", "Pod")
    assert (group["displayName"], leaf["displayName"]) == ("[0]", "say")
    assert leaf["id"] == f"w-{_fnv('w[0].say')}"
    assert leaf["boundaryID"] == "w"
    assert leaf["inputs"]["parameters"] == [{"name": "t", "value": "hi"}]
    assert leaf["outputs"] == {"parameters": [{"name": "o", "value": "hi"}], "exitCode": "0"}
    assert leaf["startedAt"].endswith("Z")
    assert root["outboundNodes"] == [leaf["id"]]


def _fnv(text: str) -> int:
    value = 2166136261
    for byte in text.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value


def test_a_step_leaves_its_command_logs_and_files(tmp_path: Path) -> None:
    template = container(["python3", "-c", "import sys; print('out'); print('err', file=sys.stderr)", "{{pod.name}}"])
    run(tmp_path, workflow(template))
    folder = next((tmp_path / "w").glob("main-*"))
    assert (folder / "stdout.log").read_text() == "out\n"
    assert (folder / "stderr.log").read_text() == "err\n"
    assert json.loads((folder / "command.json").read_text())["argv"][-1].startswith("w-main-")
    assert json.loads((folder / "status.json").read_text())["phase"] == "Succeeded"


def test_temporary_files_and_mounts_are_the_steps_own(tmp_path: Path) -> None:
    """Catches two steps that meet in the machine's /tmp, or an env path that points out of the step's directory."""
    code = "import os, sys, tempfile; open(sys.argv[1], 'w').write(tempfile.gettempdir() + ' ' + os.environ['WORK'])"
    template = container(["python3", "-c", code, "{{outputs.parameters.o.path}}"], outputs=OUT)
    template["volumes"] = [{"name": "work", "emptyDir": {}}]
    template["container"] |= {
        "volumeMounts": [{"name": "work", "mountPath": "/work"}],
        "env": [{"name": "WORK", "value": "/work/here"}],
    }
    result, _ = run(tmp_path, workflow(template))
    root = next((tmp_path / "w").glob("main-*")) / "root"
    assert output(result) == f"{root}/tmp {root}/work/here"
    assert (root / "work").is_dir()


NAMED = {
    "apiVersion": "argoproj.io/v1alpha1",
    "kind": "WorkflowTemplate",
    "metadata": {"name": "named"},
    "spec": {"entrypoint": "main", "templates": [echo("{{workflow.name}}")]},
}


def successor_template(name: str, action: str = "create") -> dict[str, Any]:
    following = {"kind": "Workflow", "metadata": {"name": name}, "spec": {"workflowTemplateRef": {"name": "named"}}}
    return {"name": "main", "resource": {"action": action, "manifest": yaml.safe_dump(following)}}


def test_a_successor_runs_after_its_creator_has_ended(tmp_path: Path) -> None:
    """Catches a successor that starts while the exit handler of its predecessor still runs."""
    bye = {**echo("x"), "name": "bye"}
    result, events = run(tmp_path, workflow(successor_template("w2"), bye, onExit="bye"), templates={"named": NAMED})
    assert (result.name, result.phase, [before.name for before in result.predecessors]) == ("w2", "Succeeded", ["w"])
    assert output(result, "w2") == "w2"
    assert result.succeeded
    kinds = [(event.workflow, event.kind) for event in events]
    assert kinds.index(("w", EventKind.WORKFLOW_FINISHED)) < kinds.index(("w2", EventKind.WORKFLOW_STARTED))


def test_creating_a_workflow_that_exists_fails_and_applying_it_changes_nothing(tmp_path: Path) -> None:
    result, _ = run(tmp_path / "a", workflow(successor_template("w")), templates={"named": NAMED})
    assert result.phase == "Failed"
    assert "AlreadyExists" in result.message
    assert result.nodes["w"]["outputs"]["exitCode"] == "64"
    result, _ = run(tmp_path / "b", workflow(successor_template("w", "apply")), templates={"named": NAMED})
    assert (result.phase, result.predecessors) == ("Succeeded", ())


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [("kind: Job\nmetadata: {name: j}", "creates a Job"), ("kind: Workflow\nmetadata: {}", "fixed metadata.name")],
)
def test_only_a_workflow_can_be_created(manifest: str, reason: str, tmp_path: Path) -> None:
    template = {"name": "main", "resource": {"action": "create", "manifest": manifest}}
    result, _ = run(tmp_path, workflow(template))
    assert result.phase == "Error"
    assert reason in result.message


def test_workflows_under_one_mutex_run_one_after_the_other(tmp_path: Path) -> None:
    """Catches two windows of one run at the same time."""
    lock = {"mutexes": [{"name": "run-{{workflow.parameters.run}}"}]}
    given = {"parameters": [{"name": "run", "value": "r"}]}

    async def go() -> list[Event]:
        async with machine(tmp_path) as (interpreter, events):
            names = ("a", "b")
            await asyncio.gather(
                *(
                    interpreter.run(workflow(echo("x"), name=name, synchronization=lock, arguments=given))
                    for name in names
                )
            )
            return events

    ends = [event.workflow for event in asyncio.run(go()) if event.kind in ("workflow started", "workflow finished")]
    assert ends in (["a", "a", "b", "b"], ["b", "b", "a", "a"])


def test_limits_are_those_of_a_cluster(tmp_path: Path) -> None:
    """Catches a payload that is passed as a parameter: it works on a laptop and not on a cluster."""
    code = "import sys; open(sys.argv[1], 'w').write('x' * (256 * 1024 + 1))"
    result, _ = run(
        tmp_path, workflow(container(["python3", "-c", code, "{{outputs.parameters.o.path}}"], outputs=OUT))
    )
    assert result.phase == "Error"
    assert "262145 bytes" in result.message


def test_ids_draw_a_name_for_generate_name(tmp_path: Path) -> None:
    manifest = workflow(echo("{{workflow.name}}"))
    manifest["metadata"] = {"generateName": "run-"}
    result, _ = run(tmp_path, manifest)
    assert result.name.startswith("run-")
    assert len(result.name) == len("run-") + 5
    assert output(result, result.name) == result.name


def test_a_value_with_a_tag_in_it_is_refused(tmp_path: Path) -> None:
    """Catches text of a user that a controller would read as a tag."""
    manifest = workflow(
        echo("{{workflow.parameters.t}}"), arguments={"parameters": [{"name": "t", "value": "{{workflow.uid}}"}]}
    )
    result, _ = run(tmp_path, manifest)
    assert result.phase == "Error"
    assert "substitute again" in result.message


def test_an_artifact_key_cannot_leave_the_repository(tmp_path: Path) -> None:
    outputs = {"artifacts": [{"name": "a", "path": "/tmp/a", "s3": {"key": "../../outside"}}]}
    template = container(["python3", "-c", WRITE, "{{outputs.artifacts.a.path}}", "x"], outputs=outputs)
    result, _ = run(tmp_path / "work", workflow(template))
    assert result.phase == "Error"
    assert "leaves the repository" in result.message
    assert not (tmp_path / "outside").exists()


def test_a_refusal_names_file_template_and_field(tmp_path: Path) -> None:
    file = tmp_path / "base.yaml"
    manifest = {**workflow(echo("x")), "kind": "WorkflowTemplate"}
    manifest["spec"]["templates"][0]["initContainers"] = []
    file.write_text(yaml.safe_dump(manifest))
    with pytest.raises(BadConfig) as refusal:
        check(load_templates(file)["w"])
    assert str(file) in str(refusal.value)
    assert "templates.main.initContainers" in str(refusal.value)


def test_rendered_templates_are_accepted() -> None:
    """Catches a field or an expression that is rendered for the cluster and that the laptop would refuse."""
    folder = Path(__file__).parents[2] / "manifests" / "base" / "templates"
    templates = load_templates(folder)
    assert templates
    for template in templates.values():
        check(template)
        parameters = template["spec"].get("arguments", {}).get("parameters", [])
        known = {f"workflow.parameters.{parameter['name']}" for parameter in parameters}
        check_spec(template["spec"], {*known, "workflow.name", "workflow.parameters", "workflow.namespace"})


def test_commands_expand_only_what_the_template_declares(tmp_path: Path) -> None:
    """Catches `$(HOME)` that works on a laptop and stays as it is in a pod."""
    template = echo("$(HOME) $(WORK) $(A) $$(A)")
    template["container"]["env"] = [{"name": "A", "value": "cluster"}, {"name": "WORK", "value": "/elsewhere"}]
    result, _ = run(tmp_path, workflow(template), environment={"A": "laptop"})
    assert output(result) == "$(HOME) /elsewhere laptop $(A)"


def container_set(*containers: dict[str, Any]) -> dict[str, Any]:
    return {"name": "main", "containerSet": {"containers": [{"image": "none", **each} for each in containers]}}


def test_an_error_in_one_container_of_a_set_is_that_of_the_pod(tmp_path: Path) -> None:
    """Catches a set whose other containers go on when one cannot start."""
    reference = {"secretKeyRef": {"name": "store", "key": "password"}}
    long = {"name": "long", "command": ["sleep", "60"]}
    bad = {"name": "bad", "command": ["sleep", "0"], "env": [{"name": "P", "valueFrom": reference}]}
    result, _ = run(tmp_path, workflow(container_set(long, bad)))
    assert result.phase == "Error"
    assert "store[password] for P" in result.message


@pytest.mark.parametrize(("first", "second"), [(["b"], ["a"]), (["nobody"], [])])
def test_containers_that_would_wait_for_ever_are_refused(first: list[str], second: list[str], tmp_path: Path) -> None:
    given = container_set(
        {"name": "a", "command": ["sleep", "0"], "dependencies": first},
        {"name": "b", "command": ["sleep", "0"], "dependencies": second},
    )
    with pytest.raises(BadConfig, match=r"containerSet.containers.a.dependencies"):
        run(tmp_path, workflow(given))


def test_recursion_ends_where_a_controller_ends_it(tmp_path: Path) -> None:
    """Catches a chain that fits on a laptop and not on a cluster: 99 calls, the one after is an Error."""
    result, _ = run(tmp_path, workflow({"name": "main", "steps": [[{"name": "next", "template": "main"}]]}))
    (error,) = (node for node in result.nodes.values() if "recursion" in node.get("message", ""))
    assert (error["name"].count("next"), error["phase"]) == (99, "Error")
    assert error["message"] == "Maximum recursion depth exceeded"
    assert len([node for node in result.nodes.values() if node["type"] == "Steps"]) == 99
