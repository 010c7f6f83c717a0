"""The key layout: what docs/store.md says, and nothing that a store or a shell could read otherwise."""

from __future__ import annotations

import pytest

from colchis.components.errors import BadConfig
from colchis.components.store import StageKey, keys


def test_the_layout() -> None:
    """Keys are a format: changing one strands every run that exists."""
    digest = "ab" * 32
    assert keys.pool_lease("gpu-0") == "pools/gpu-0/lease.json"
    assert keys.input_manifest(digest) == f"inputs/{digest}/manifest.json"
    assert keys.input_file(digest, "a/b.json") == f"inputs/{digest}/files/a/b.json"
    assert keys.run_record("r") == "runs/r/run.json"
    assert keys.run_lease("r") == "runs/r/control/lease.json"
    assert keys.run_stop("r") == "runs/r/control/stop.json"
    assert keys.serving("r") == "runs/r/serving.json"
    assert keys.summary("r", 11) == "runs/r/iterations/000011/summary.json"
    assert keys.weights_manifest("r", 12) == "runs/r/weights/v00000012/manifest.json"
    assert StageKey("r", 11, "train").commit == "runs/r/iterations/000011/train/commit.json"
    assert StageKey("r", 11, "rollout", 3).commit == "runs/r/iterations/000011/rollout/0003/commit.json"
    assert StageKey("r", 11, "rollout", 3).attempt("x") == "runs/r/iterations/000011/rollout/0003/attempts/x/"


@pytest.mark.parametrize("name", ["", "A", "a_b", "a/b", "../a", "-a", "a-", "a" * 64, "a b", "{{x}}"])
def test_names_of_runs_and_pools_are_labels(name: str) -> None:
    for make in (keys.run_record, keys.pool_lease, lambda run: StageKey(run, 0, "train").commit):
        with pytest.raises(BadConfig, match="expected at most 63"):
            make(name)


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/./b", "a\\b", "a\nb", "ü" * 300])
def test_names_of_files_stay_in_their_folder(name: str) -> None:
    with pytest.raises(BadConfig, match="object name"):
        keys.file_name(name)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keys.summary("r", -1),
        lambda: keys.weights_manifest("r", -1),
        lambda: StageKey("r", -1, "train"),
        lambda: StageKey("r", 0, "train", -1),
        lambda: StageKey("r", 0, "Train"),
        lambda: keys.input_manifest("abc"),
    ],
)
def test_numbers_and_digests(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BadConfig):
        make()
