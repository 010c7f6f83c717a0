"""Runs that cannot be as they were set up: each says what is wrong and what to do, and none waits without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from colchis.components.stages.interface import INTERFACE
from tests.cluster.client import Cluster
from tests.cluster.runs import DEADLINE_S, argo, ended, shape, submit

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("strict", "small_pool", "alone"),
]

Templates = dict[str, Any]


def set_variable(container: dict[str, Any], name: str, value: dict[str, Any]) -> None:
    """The variable `name` is `value` (a `value` or a `valueFrom`) in one container."""
    container["env"] = [v for v in container["env"] if v["name"] != name] + [{"name": name, **value}]


def refused(config: Path, cluster: Cluster, name: str) -> str:
    """The message of `begin`, which ends the run of shape `name`."""
    status = ended(cluster, submit(config, name, "--shape", name), phase="Failed")
    (begin,) = [n for n in status["nodes"].values() if n["type"] == "Pod" and n["templateName"] == "begin"]
    assert "exit code 78" in begin["message"]
    return str(begin["message"])


def test_a_bucket_that_is_not_there(config: Path, cluster: Cluster) -> None:
    def change(templates: Templates) -> None:
        set_variable(templates["begin"]["container"], "COLCHIS_S3_BUCKET", {"value": "absent"})

    shape(cluster, "bucketless", change)
    assert "absent" in refused(config, cluster, "bucketless")


def test_a_template_that_is_older_than_the_code(config: Path, cluster: Cluster) -> None:
    """Fault: stages that are called as they were in another release, and fail one by one in the middle of a run."""

    def change(templates: Templates) -> None:
        arguments = templates["begin"]["container"]["args"]
        arguments[arguments.index("--interface") + 1] = str(INTERFACE - 1)

    shape(cluster, "aged", change)
    message = refused(config, cluster, "aged")
    assert "the template is older than the image" in message
    assert "apply manifests/" in message


def test_a_secret_that_is_not_there(config: Path, cluster: Cluster) -> None:
    """Its pod waits for it, and says so: docs/operations.md, `When it does not start`."""

    def change(templates: Templates) -> None:
        reference = {"secretKeyRef": {"name": "colchis-absent", "key": "endpoint"}}
        set_variable(templates["begin"]["container"], "COLCHIS_S3_ENDPOINT", {"valueFrom": reference})

    shape(cluster, "secretless", change)
    workflow = submit(config, "secretless", "--shape", "secretless")
    message = cluster.node_message(workflow, "begin", "colchis-absent", deadline_s=DEADLINE_S)
    assert "CreateContainerConfigError" in message
    argo("terminate", workflow)
    ended(cluster, workflow, phase="Failed")


def test_a_quota_that_is_too_small(config: Path, cluster: Cluster) -> None:
    """Its node waits and says for what; it goes on by itself once there is room."""
    with cluster.quota({"pods": "2"}):  # the engines'
        workflow = submit(config, "crowded")
        message = cluster.node_message(workflow, "begin", "exceeded quota", deadline_s=DEADLINE_S)
        assert "pods=2" in message
    ended(cluster, workflow)


def test_an_image_that_is_not_there(config: Path, cluster: Cluster) -> None:
    def change(templates: Templates) -> None:
        templates["train"]["container"].update(image="localhost/colchis/unbuilt:1")

    shape(cluster, "unbuilt", change)
    workflow = submit(config, "unbuilt", "--shape", "unbuilt")
    message = cluster.node_message(workflow, "train", "unbuilt:1", deadline_s=DEADLINE_S)
    assert "ImagePullBackOff" in message or "ErrImagePull" in message
    argo("stop", workflow)
    ended(cluster, workflow, phase="Failed")


def test_a_trainer_out_of_memory(config: Path, cluster: Cluster) -> None:
    """Fault: a trainer that is killed for memory is tried for ever, or fails without the word."""

    def change(templates: Templates) -> None:
        for bound in templates["train"]["container"]["resources"].values():
            bound["memory"] = "64Mi"

    shape(cluster, "narrow", change)
    status = ended(cluster, submit(config, "narrow", "--shape", "narrow"), phase="Failed")
    tries = [n for n in status["nodes"].values() if n["type"] == "Pod" and n["templateName"] == "train"]
    assert len(tries) == 6, "once, and five times more"
    assert {"OOMKilled" in n["message"] for n in tries} == {True}, [n["message"] for n in tries]
