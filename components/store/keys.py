"""The key of every object, in one place. Pure functions: nothing here talks to a store.

    pools/POOL/lease.json
    inputs/<sha256>/manifest.json, inputs/<sha256>/files/NAME
    runs/RUN/run.json, changes/0001.json, serving.json, control/lease.json, control/stop.json, outcomes/WORKFLOW.json
    runs/RUN/iterations/000011/STAGE[/0003]/commit.json and attempts/<attempt>/NAME
    runs/RUN/iterations/000011/admission.json, summary.json
    runs/RUN/weights/v00000012/manifest.json, reloads/RELOAD/BOUNDARY.json

No key is also a prefix of another with '/' behind it: several stores keep keys as files in directories.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from colchis.components.errors import BadConfig

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_STAGE = re.compile(r"[a-z][a-z0-9_-]{0,62}")


def name(what: str, value: str) -> str:
    """`value`, if it may be given to a run or a pool; shorter than a label, because windows and requests add to it."""
    if not _NAME.fullmatch(value):
        raise BadConfig(f"{what} {value!r}: use small letters, digits and hyphens, at most 42, e.g. 'first-run'")
    return value


def label(what: str, value: str) -> str:
    """`value`, if it may name a run or a pool: a DNS label, since it also names Kubernetes objects. Else BadConfig."""
    if not _LABEL.fullmatch(value):
        raise BadConfig(f"{what} '{value}': expected at most 63 of a-z, 0-9 and '-', not starting or ending with '-'")
    return value


def file_name(name: str) -> str:
    """`name`, if it is a plain relative path (`weights/model.safetensors`) that is the same in every store."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in name or not name.isprintable():
        raise BadConfig(f"object name {name!r}: expected a relative path of plain names joined by '/'")
    if len(name.encode()) > 512:
        raise BadConfig(f"object name {name[:64]!r}...: {len(name.encode())} bytes, expected at most 512")
    return name


def pool_lease(pool: str) -> str:
    """Which run owns an engine pool."""
    return f"pools/{label('pool', pool)}/lease.json"


def input_prefix(digest: str) -> str:
    """Everything of one input (model, tokenizer, dataset), named by its content."""
    if not _DIGEST.fullmatch(digest):
        raise BadConfig(f"input digest '{digest}': expected 64 hexadecimal digits")
    return f"inputs/{digest}/"


def input_manifest(digest: str) -> str:
    """Written last: an input without it is not there."""
    return input_prefix(digest) + "manifest.json"


def input_file(digest: str, name: str) -> str:
    """One file of an input."""
    return input_prefix(digest) + "files/" + file_name(name)


def run_prefix(run: str) -> str:
    """Everything of one run."""
    return f"runs/{label('run', run)}/"


def run_record(run: str) -> str:
    """Canonical configuration, digest, template digest, code version; created once."""
    return run_prefix(run) + "run.json"


def run_change(run: str, number: int) -> str:
    """The record after the number-th change of fields outside the identity; created once, counted from 1."""
    return f"{run_prefix(run)}changes/{_count('change', number):04d}.json"


def run_outcome(run: str, workflow: str) -> str:
    """How one Workflow of the run ended."""
    return f"{run_prefix(run)}outcomes/{file_name(workflow)}.json"


def run_lease(run: str) -> str:
    """Who drives the run."""
    return run_prefix(run) + "control/lease.json"


def run_stop(run: str) -> str:
    """A wish to stop, read by the first stage of each iteration."""
    return run_prefix(run) + "control/stop.json"


def serving(run: str) -> str:
    """The declared policy version (compare-and-swap)."""
    return run_prefix(run) + "serving.json"


def iteration_prefix(run: str, iteration: int) -> str:
    """Everything of one iteration; iteration i consumes v_i and makes v_(i+1)."""
    return f"{run_prefix(run)}iterations/{_count('iteration', iteration):06d}/"


def admission(run: str, iteration: int) -> str:
    """What the iteration consists of; decided by its first stage."""
    return iteration_prefix(run, iteration) + "admission.json"


def summary(run: str, iteration: int) -> str:
    """Written by reload: closes the iteration."""
    return iteration_prefix(run, iteration) + "summary.json"


def weights_prefix(run: str, version: int) -> str:
    """What is said about one policy version."""
    return f"{run_prefix(run)}weights/v{_count('version', version):08d}/"


def weights_manifest(run: str, version: int) -> str:
    """Copy of what the train commit decided."""
    return weights_prefix(run, version) + "manifest.json"


def reload_record(run: str, version: int, reload: str, boundary: str) -> str:
    """What one boundary of one reload proved; a version may be loaded more than once."""
    return f"{weights_prefix(run, version)}reloads/{file_name(reload)}/{file_name(boundary)}.json"


def _count(what: str, value: int) -> int:
    if value < 0:
        raise BadConfig(f"{what} {value}: expected 0 or more")
    return value


@dataclass(frozen=True)
class StageKey:
    """One unit of work that is committed once: a stage of an iteration, or one shard of it."""

    run: str
    iteration: int
    stage: str
    shard: int | None = None

    def __post_init__(self) -> None:
        label("run", self.run)
        _count("iteration", self.iteration)
        if not _STAGE.fullmatch(self.stage):
            raise BadConfig(f"stage '{self.stage}': expected a name of a-z, 0-9, '-' and '_'")
        if self.shard is not None:
            _count("shard", self.shard)

    def __str__(self) -> str:
        shard = "" if self.shard is None else f" shard {self.shard}"
        return f"{self.stage}{shard} of iteration {self.iteration} of run '{self.run}'"

    @property
    def prefix(self) -> str:
        shard = "" if self.shard is None else f"{self.shard:04d}/"
        return f"{iteration_prefix(self.run, self.iteration)}{self.stage}/{shard}"

    @property
    def commit(self) -> str:
        """The one object that decides."""
        return self.prefix + "commit.json"

    @property
    def attempts(self) -> str:
        """Prefix of what every attempt wrote, winners and losers."""
        return self.prefix + "attempts/"

    def attempt(self, attempt: str) -> str:
        """Prefix of what one attempt wrote."""
        return f"{self.attempts}{attempt}/"
