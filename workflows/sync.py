"""The synchronous mode.

    begin -> fill -> [ rollout x N -> (grade x M) -> batch -> train -> reload ] x window -> successor | evaluate
                       (evaluate)                                                            and on exit: close

Iteration i samples with policy v_i and trains v_(i+1); nobody samples while it trains, so every token has lag 0.
"""

from __future__ import annotations

from hera.workflows import NoneArchiveStrategy, Parameter, S3Artifact, Step, Steps, WorkflowTemplate
from hera.workflows import models as m

from colchis.components.config import SECTIONS
from colchis.components.stages.interface import INTERFACE
from colchis.workflows.templates import DIGEST, ENGINE_KEY, POD_SECURITY, Shape, reload_set, stage, successor

MODE = "sync"

ITERATION = ["--iteration", "{{inputs.parameters.iteration}}"]
NEXT_VERSION = "{{=string(asInt(inputs.parameters.iteration) + 1)}}"
EVALUATE_NOW = "{{=asInt(inputs.parameters.iteration) % asInt(inputs.parameters.every) == 0}}"

DESCRIPTIONS = {
    "run": "Name of the run: small letters, digits and hyphens. The same name with the same configuration continues it.",
    "pool": "Pool of engines that the run leases.",
    "start": "First iteration of this window; empty: where the run stands.",
}


def arguments() -> list[Parameter]:
    """The template's parameters: run, pool, start and one per section of the configuration (YAML or JSON text)."""
    parameters = [
        Parameter(name="run", description=DESCRIPTIONS["run"]),
        Parameter(name="pool", value="main", description=DESCRIPTIONS["pool"]),
        Parameter(name="start", value="", description=DESCRIPTIONS["start"]),
    ]
    for section in SECTIONS:
        if section == "mode":
            parameters.append(Parameter(name="mode", value=MODE, enum=[MODE], description="Mode of this template."))
        else:
            text = f"Section '{section}' of the run's configuration; empty: as begun before, or defaults."
            parameters.append(Parameter(name=section, value="", description=text))
    return parameters


def sync(shape: Shape) -> WorkflowTemplate:
    """The WorkflowTemplate of the synchronous mode for one shape of pods."""
    name = f"colchis-{MODE}-{shape.name}"
    sections = [part for s in SECTIONS for part in ("--section", f"{s}={{{{workflow.parameters.{s}}}}}")]
    report = S3Artifact(
        name="report",
        path="/tmp/outputs/report.html",
        key="runs/{{workflow.parameters.run}}/reports/{{workflow.name}}.html",
        archive=NoneArchiveStrategy(),
        optional=True,
    )
    with WorkflowTemplate(
        name=name,
        entrypoint="main",
        on_exit="close",
        arguments=arguments(),
        labels={"app.kubernetes.io/part-of": "colchis", "colchis.dev/mode": MODE, "colchis.dev/shape": shape.name},
        annotations={
            "workflows.argoproj.io/title": "RL post-training, synchronous",
            "workflows.argoproj.io/description": "rollout, grade, batch, train, reload; every token at lag 0",
            "colchis.dev/digest": DIGEST,
        },
        service_account_name="colchis-workflow",
        automount_service_account_token=False,
        executor=m.ExecutorConfig(service_account_name="colchis-executor"),
        security_context=POD_SECURITY,
        synchronization=m.Synchronization(mutexes=[m.Mutex(name="colchis-run-{{workflow.parameters.run}}")]),
        artifact_repository_ref=m.ArtifactRepositoryRef(config_map="artifact-repositories", key="default"),
        artifact_gc=m.ArtifactGC(strategy="Never"),
        pod_gc=m.PodGC(strategy="OnPodCompletion", delete_delay_duration="60s"),
        ttl_strategy=m.TTLStrategy(seconds_after_success=86400, seconds_after_failure=604800),
        workflow_metadata=m.WorkflowMetadata(
            labels={"colchis.dev/mode": MODE},
            labels_from={
                f"colchis.dev/{name}": m.LabelValueFrom(expression=f"workflow.parameters.{name}")
                for name in ("run", "pool", "start")
            },
        ),
    ) as template:
        begin = stage(
            shape,
            "begin",
            [
                *("--template", name, "--template-digest", DIGEST, "--interface", str(INTERFACE)),
                *("--workflow", "{{workflow.name}}"),
                *("--start", "{{workflow.parameters.start}}", *sections),
            ],
            outputs={
                "version": "0",
                "first": "0",
                "count": "0",
                "next": "0",
                "more": "false",
                "fill": "false",
                "shards": "1",
                "grade-shards": "0",
                "every": "1",
            },
        )
        rollout = stage(
            shape,
            "rollout",
            [*ITERATION, "--shard", "{{inputs.parameters.shard}}", "--shards", "{{inputs.parameters.shards}}"],
            inputs=["iteration", "shard", "shards"],
            env=[ENGINE_KEY],
        )
        grade = stage(
            shape,
            "grade",
            [*ITERATION, "--shard", "{{inputs.parameters.shard}}", "--shards", "{{inputs.parameters.shards}}"],
            inputs=["iteration", "shard", "shards"],
        )
        batch = stage(shape, "batch", ITERATION, inputs=["iteration"], outputs={"decision": "stop"})
        train = stage(shape, "train", ITERATION, inputs=["iteration"], trainer=True)
        reload = reload_set(shape)
        evaluate = stage(
            shape, "evaluate", ["--version", "{{inputs.parameters.version}}"], inputs=["version"], env=[ENGINE_KEY]
        )
        again = successor(name)
        stage(
            shape,
            "close",
            ["--workflow", "{{workflow.name}}", "--status", "{{workflow.status}}"],
            artifacts=[report],
            deadline_s=600,
        )

        with Steps(
            name="iteration",
            inputs=[Parameter(name=n) for n in ("iteration", "shards", "grade-shards", "every")],
        ) as iteration:
            i = "{{inputs.parameters.iteration}}"
            shards, grade_shards = "{{inputs.parameters.shards}}", "{{inputs.parameters.grade-shards}}"
            with iteration.parallel():
                rollout(
                    name="rollout",
                    arguments={"iteration": i, "shard": "{{item}}", "shards": shards},
                    with_sequence=m.Sequence(count=shards),
                )
                evaluate(name="evaluate", arguments={"version": i}, when=EVALUATE_NOW)
            grade(
                name="grade",
                arguments={"iteration": i, "shard": "{{item}}", "shards": grade_shards},
                with_sequence=m.Sequence(count=grade_shards),
            )
            batch(name="batch", arguments={"iteration": i})
            go_on = "'{{steps.batch.outputs.parameters.decision}}' != 'stop'"
            train(name="train", arguments={"iteration": i}, when=go_on)
            reload(name="reload", arguments={"version": NEXT_VERSION}, when=go_on)

        with Steps(
            name="window",
            parallelism=1,
            fail_fast=True,
            inputs=[Parameter(name=n) for n in ("first", "count", "shards", "grade-shards", "every")],
        ) as window:
            iteration(
                name="iterate",
                arguments={
                    "iteration": "{{item}}",
                    "shards": window.get_parameter("shards"),
                    "grade-shards": window.get_parameter("grade-shards"),
                    "every": window.get_parameter("every"),
                },
                with_sequence=m.Sequence(start="{{inputs.parameters.first}}", count="{{inputs.parameters.count}}"),
            )

        with Steps(name="main"):
            b = begin(name="begin")
            assert isinstance(b, Step)
            begun = {n: b.get_parameter(n) for n in ("first", "count", "shards", "grade-shards", "every")}
            fill = "{{steps.begin.outputs.parameters.fill}} == true"
            reload(name="fill", arguments={"version": b.get_parameter("version")}, when=fill)
            window(name="window", arguments=begun, when="{{steps.begin.outputs.parameters.count}} > 0")
            more = "{{steps.begin.outputs.parameters.more}}"
            again(name="successor", arguments={"next": b.get_parameter("next")}, when=f"{more} == true")
            evaluate(name="evaluate", arguments={"version": "serving"}, when=f"{more} == false")
    return template
