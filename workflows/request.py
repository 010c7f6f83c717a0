"""What a run asks for, as the Workflow object that starts it: a reference to a template and arguments, nothing else."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from colchis.components.config import RunConfig, to_parameters
from colchis.components.errors import BadConfig
from colchis.components.store import Store, upload_input

RUN_LABEL = "colchis.dev/run"
LONGEST_RUN = 42
HASH_CHARACTERS = 8

ONCE = {
    "kustomize.toolkit.fluxcd.io/prune": "disabled",
    "kustomize.toolkit.fluxcd.io/ssa": "IfNotPresent",
    "argocd.argoproj.io/sync-options": "Prune=false",
}
"""A commit starts a run: removing the file does not end it, and nobody changes it while it goes on."""

REQUEST_HEADER = """\
# Made by `colchis request`. Commit it where GitOps looks for runs: it starts once, and goes on if the file is removed.
"""


def default_name(config: Path) -> str:
    """The run's name when none is given: the file's, or its folder's when the file is just `run.yaml`."""
    stem = config.resolve().parent.name if config.stem == "run" else config.stem
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:LONGEST_RUN]
    return name or "run"


def pin_files(config: RunConfig, source: Path, store: Store) -> RunConfig:
    """Upload the `file:` inputs of a configuration and name them by content. Paths are relative to `source`'s folder."""
    document = config.model_dump(mode="json")
    for section in ("model", "environment"):
        value = document[section].get("source", "")
        if not value.startswith("file:"):
            continue
        path = (source.resolve().parent / value.removeprefix("file:")).resolve()
        if not path.exists():
            raise BadConfig(f"{section}.source: {path} does not exist", where=str(source))
        if section == "model":
            _check_model(path)
        document[section]["source"] = f"input:{upload(store, path)}"
    return RunConfig.model_validate(document)


def _check_model(path: Path) -> None:
    """Before gigabytes are uploaded, or a folder that is anything else. Its content is checked when the run begins."""
    for pattern in ("config.json", "tokenizer.json", "*.safetensors"):
        if not any(path.glob(pattern)):
            raise BadConfig(
                f"model.source: no {pattern} here", where=str(path), hint="name a complete Hugging Face folder"
            )


def check_pinned(config: RunConfig) -> None:
    """BadConfig when an input is still a file: pods could not read it."""
    for section in ("model", "environment"):
        source = getattr(getattr(config, section), "source", "")
        if source.startswith("file:"):
            raise BadConfig(
                f"{section}.source: '{source}' is a file of this machine",
                hint="set the COLCHIS_S3_* variables of the cluster's store to upload it, or name an input by digest",
            )


def upload(store: Store, path: Path) -> str:
    """Digest of a folder, or of one file as a folder of its own, after uploading it."""
    if path.is_dir():
        return upload_input(store, path)
    if not path.is_file():
        raise BadConfig("neither a file nor a folder", where=str(path), hint="devices and pipes cannot be uploaded")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(path, Path(folder) / path.name)
        return upload_input(store, Path(folder))


def workflow(
    config: RunConfig, *, run: str, pool: str, shape: str, metadata: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The Workflow that starts `run`. Without `metadata` its name is made by the cluster, from the run's."""
    document = {"generateName": f"{run}-", **(metadata or {})}
    document["labels"] = {"app.kubernetes.io/part-of": "colchis", RUN_LABEL: run}
    if "name" in document:
        del document["generateName"]
    arguments = {"run": run, "pool": pool, **to_parameters(config)}
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": document,
        "spec": {
            "workflowTemplateRef": {"name": f"colchis-{config.mode}-{shape}"},
            "arguments": {"parameters": [{"name": k, "value": v} for k, v in arguments.items()]},
        },
    }


def request(config: RunConfig, *, name: str, pool: str, shape: str) -> dict[str, Any]:
    """A run request for GitOps. Workflow and run are called `name` with a hash of what is asked for: another request is
    another run, and the same one, applied again, is the same.

    BadConfig when the name is too long for that, or an input is still a file.
    """
    if len(name) > (longest := LONGEST_RUN - HASH_CHARACTERS - 1) or not re.fullmatch(
        r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name
    ):
        raise BadConfig(f"--run {name!r}: use small letters, digits and hyphens, at most {longest}: a hash is added")
    check_pinned(config)
    asked = json.dumps([f"colchis-{config.mode}-{shape}", pool, to_parameters(config)], sort_keys=True)
    run = f"{name}-{hashlib.sha256(asked.encode()).hexdigest()[:HASH_CHARACTERS]}"
    document = workflow(config, run=run, pool=pool, shape=shape, metadata={"name": run, "annotations": dict(ONCE)})
    for parameter in document["spec"]["arguments"]["parameters"]:
        if parameter["value"].startswith("{"):  # for those who review the commit
            parameter["value"] = yaml.safe_dump(json.loads(parameter["value"]), sort_keys=False, allow_unicode=True)
    return document
