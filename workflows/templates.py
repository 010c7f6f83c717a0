"""One container template per stage: command, image, security, retries and deadlines in one place.

A stage is `python -m colchis.components STAGE ...`. Its outputs go to the paths that the manifest names, so the same
manifest runs in pods and under the local interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hera.workflows import (
    Container,
    ContainerNode,
    ContainerSet,
    EmptyDirVolume,
    NoneArchiveStrategy,
    Parameter,
    Resource,
    Resources,
    RetryStrategy,
    S3Artifact,
)
from hera.workflows import (
    models as m,
)

import colchis
from colchis.components.errors import BadConfig
from colchis.workflows.boundaries import BOUNDARIES

TAKEN_AWAY = [75, 137, 143, 2]
"""Exit codes worth another try: temporary failure, SIGKILL (out of memory, lost node), SIGTERM, and SIGTERM at a moment when
Argo's executor does not handle it: it is process 1 of the container, and Go then ends with 2. No stage ends with that.

`RETRY` reads the code in the message, where there is one. The pod's own is that of `main`, which says 64 when a container of
its set failed before it, or 143, for the controller ends what is left of such a pod. The message is that of the container which
failed first (see `BOUNDARIES`)."""

_CODE_IN_MESSAGE = "^[^(]*[(]exit code "

RETRY = RetryStrategy(
    limit="5",
    retry_policy="Always",
    backoff=m.Backoff(duration="2s", factor="2"),  # a max_duration would count, and end, the stage's own time as well
    expression=(
        "lastRetry.status == 'Error'"
        f" || lastRetry.message matches '{_CODE_IN_MESSAGE}({'|'.join(map(str, TAKEN_AWAY))})[)]'"
        f" || (!(lastRetry.message matches '{_CODE_IN_MESSAGE}') && asInt(lastRetry.exitCode) in {TAKEN_AWAY})"
        " || lastRetry.message contains 'context canceled'"  # terminated while the executor starts the program: 64
        " || lastRetry.message matches 'node shutdown|low on resource'"  # what the kubelet itself says of a pod that it ends
    ),
)

DIGEST = "digest of this template"
"""Stands where `colchis render` puts the sha256 of the rest, so that a run can tell what it was run by."""

POD_SECURITY = m.PodSecurityContext(
    run_as_non_root=True,
    run_as_user=10001,
    run_as_group=10001,
    fs_group=10001,
    seccomp_profile=m.SeccompProfile(type="RuntimeDefault"),
)

CONTAINER_SECURITY = m.SecurityContext(
    allow_privilege_escalation=False,
    read_only_root_filesystem=True,
    run_as_non_root=True,
    capabilities=m.Capabilities(drop=["ALL"]),
)


@dataclass(frozen=True)
class Shape:
    """What a run's pods ask of the cluster. One WorkflowTemplate is rendered per mode and shape."""

    name: str
    stage_image: str = f"colchis/stage:{colchis.__version__}"
    trainer_image: str = f"colchis/trainer:{colchis.__version__}"
    stage: Mapping[str, str] = field(default_factory=lambda: {"cpu": "100m", "memory": "512Mi"})
    trainer: Mapping[str, str] = field(default_factory=lambda: {"cpu": "1", "memory": "4Gi"})
    trainer_gpus: int = 0
    reload_from: Literal["stage", "trainer"] = "stage"
    """Image of the reload: only the trainer's can send weights to engines (`reload.transfer`)."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, str]] = ()

    def __post_init__(self) -> None:
        if self.reload_from not in ("stage", "trainer"):
            raise BadConfig(f"shape '{self.name}': reload_from is '{self.reload_from}', expected stage or trainer")


def _store_secret(variable: str, key: str, *, optional: bool | None = None) -> m.EnvVar:
    selector = m.SecretKeySelector(name="colchis-store", key=key, optional=optional)
    return m.EnvVar(name=variable, value_from=m.EnvVarSource(secret_key_ref=selector))


ENVIRONMENT = [
    _store_secret("COLCHIS_S3_ENDPOINT", "endpoint"),
    _store_secret("COLCHIS_S3_BUCKET", "bucket"),
    _store_secret("COLCHIS_S3_REGION", "region"),
    _store_secret("AWS_ACCESS_KEY_ID", "accessKey"),
    _store_secret("AWS_SECRET_ACCESS_KEY", "secretKey"),
    _store_secret("COLCHIS_AGENT_TOKEN", "agentToken"),
    m.EnvVar(
        name="COLCHIS_ENGINES",
        value_from=m.EnvVarSource(
            config_map_key_ref=m.ConfigMapKeySelector(name="colchis-pool-{{workflow.parameters.pool}}", key="engines")
        ),
    ),
    m.EnvVar(name="OMP_NUM_THREADS", value="1"),
    m.EnvVar(name="PYTHONUNBUFFERED", value="1"),
]
"""Every stage's environment. The pool's ConfigMap and the store's Secret are the cluster's; locally they are made."""

ENGINE_KEY = _store_secret("COLCHIS_ENGINE_KEY", "engineKey", optional=True)
"""For engines that take requests with a key only. Stages that ask engines themselves have it; the others ask their agents."""

RUN_ARGS = ["--run", "{{workflow.parameters.run}}", "--pool", "{{workflow.parameters.pool}}"]


def _labels(stage: str) -> dict[str, str]:
    """Labels of a pod: network policies (manifests/base/network-policies.yaml) know stages by them."""
    return {"colchis.dev/stage": stage}


def _outputs(
    names: Mapping[str, str], artifacts: Sequence[S3Artifact]
) -> tuple[list[str], list[Parameter | S3Artifact]]:
    """Arguments that tell a stage where its outputs go, and their declaration. `names`: output -> default on stop."""
    args: list[str] = []
    declared: list[Parameter | S3Artifact] = []
    for name, default in names.items():
        args += ["--out", f"{name}={{{{outputs.parameters.{name}.path}}}}"]
        declared.append(Parameter(name=name, value_from=m.ValueFrom(path=f"/tmp/outputs/{name}", default=default)))
    for artifact in artifacts:
        args += ["--out", f"{artifact.name}={{{{outputs.artifacts.{artifact.name}.path}}}}"]
        declared.append(artifact)
    return args, declared


def stage(
    shape: Shape,
    name: str,
    args: Sequence[str] = (),
    *,
    inputs: Sequence[str] = (),
    outputs: Mapping[str, str] | None = None,
    artifacts: Sequence[S3Artifact] = (),
    deadline_s: int = 3600,
    trainer: bool = False,
    env: Sequence[m.EnvVar] = (),
    retry: RetryStrategy | None = RETRY,
) -> Container:
    """A template that runs one stage as one pod."""
    out_args, declared = _outputs(outputs or {}, artifacts)
    resources = shape.trainer if trainer else shape.stage
    return Container(
        name=name,
        image=shape.trainer_image if trainer else shape.stage_image,
        image_pull_policy="IfNotPresent",
        command=["python", "-m", "colchis.components", name],
        args=[*RUN_ARGS, *args, *out_args],
        labels=_labels(name),
        inputs=[Parameter(name=parameter) for parameter in inputs],
        outputs=declared,
        env=[*ENVIRONMENT, *env],
        resources=Resources(
            cpu_request=resources["cpu"],
            memory_request=resources["memory"],
            memory_limit=resources["memory"],
            gpus=shape.trainer_gpus or None if trainer else None,
        ),
        node_selector=dict(shape.node_selector) or None if trainer else None,
        tolerations=[m.Toleration(**t) for t in shape.tolerations] or None if trainer else None,
        retry_strategy=retry,
        security_context=CONTAINER_SECURITY,
        active_deadline_seconds=deadline_s,
        volumes=[EmptyDirVolume(name="tmp", mount_path="/tmp")],
    )


def reload_set(shape: Shape, *, deadline_s: int = 3600) -> ContainerSet:
    """One pod whose five containers are five visible nodes: each boundary of a reload proves itself before the next.

    A pod that was taken away is tried again from the first boundary, as is one of which a boundary failed for the moment;
    one whose boundary refused is not.
    """
    report = S3Artifact(
        name="report",
        path="/tmp/outputs/report.html",
        key="runs/{{workflow.parameters.run}}/reports/v{{inputs.parameters.version}}.html",
        archive=NoneArchiveStrategy(),
        optional=True,  # the first fill closes no iteration
    )
    out_args, declared = _outputs({"version": "none"}, [report])
    sends = shape.reload_from == "trainer"
    on_gpu = sends and shape.trainer_gpus > 0
    memory = (shape.trainer if sends else shape.stage)["memory"]
    with ContainerSet(
        name="reload",
        labels=_labels("reload"),
        inputs=[Parameter(name="version")],
        outputs=declared,
        active_deadline_seconds=deadline_s,
        volumes=[EmptyDirVolume(name="tmp")],
        volume_mounts=[m.VolumeMount(name="tmp", mount_path="/tmp")],
        node_selector=dict(shape.node_selector) or None if on_gpu else None,
        tolerations=[m.Toleration(**t) for t in shape.tolerations] or None if on_gpu else None,
        retry_strategy=RETRY,
    ) as reload:
        for before, (name, boundary) in zip([None, *BOUNDARIES], BOUNDARIES.items(), strict=False):
            gpu = {"nvidia.com/gpu": "1"} if on_gpu and boundary == "load" else {}
            ContainerNode(
                name=name,
                image=shape.trainer_image if sends else shape.stage_image,
                image_pull_policy="IfNotPresent",
                command=["python", "-m", "colchis.components", "reload"],
                args=[
                    *RUN_ARGS,
                    *("--version", "{{inputs.parameters.version}}"),
                    *("--boundary", boundary),
                    *(out_args if name == "main" else []),
                ],
                env=ENVIRONMENT,
                dependencies=[before] if before else None,
                security_context=CONTAINER_SECURITY,
                resources=m.ResourceRequirements(
                    requests={"cpu": "50m", "memory": "256Mi"}, limits={"memory": memory, **gpu}
                ),
            )
    return reload


SUCCESSOR = """\
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata:
  name: "{{workflow.parameters.run}}-from-{{inputs.parameters.next}}"
  labels:
    colchis.dev/run: "{{workflow.parameters.run}}"
spec:
  workflowTemplateRef:
    name: "%s"
  arguments:
    parameters:
    - name: "run"
      value: "{{workflow.parameters.run}}"
    - name: "pool"
      value: "{{workflow.parameters.pool}}"
    - name: "start"
      value: "{{inputs.parameters.next}}"
"""


def successor(template: str) -> Resource:
    """Creates the Workflow of the next window. Its fixed name makes a second try a no-op."""
    return Resource(
        name="successor",
        labels=_labels("successor"),
        action="apply",
        manifest=SUCCESSOR % template,
        inputs=[Parameter(name="next")],
        service_account_name="colchis-submitter",
        executor=m.ExecutorConfig(service_account_name="colchis-submitter"),
        retry_strategy=RetryStrategy(limit="3", retry_policy="Always"),
    )


__all__ = ["POD_SECURITY", "Shape", "reload_set", "stage", "successor"]
