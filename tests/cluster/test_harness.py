"""The harness's cache and its image archives; neither needs a cluster."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

import pytest

from tests.cluster.harness import build, oci


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def test_a_part_is_made_again_when_a_source_changes(tmp_path: Path) -> None:
    """Catches a cluster that runs binaries of another commit."""
    source = tmp_path / "main.go"
    made: list[Path] = []

    def part() -> Path:
        return build._cached("part", ["flags", source], made.append)

    source.write_text("one")
    first = part()
    assert part() == first
    source.write_text("two")
    assert part() != first
    assert len(made) == 2


def test_a_part_that_failed_is_not_taken_for_built(cache: Path) -> None:
    """Catches a half-made folder that the next start would use."""

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise build.CannotBuild("no network")

    with pytest.raises(build.CannotBuild):
        build._cached("part", ["x"], fail)
    assert list(cache.iterdir()) == []


def test_an_image_archive_names_what_it_holds(tmp_path: Path) -> None:
    """Catches an archive whose digests, modes or skipped folders are not what containerd will see."""
    root = tmp_path / "root"
    for folder in ("bin", "dev", "var/cache"):
        (root / folder).mkdir(parents=True)
    (root / "bin/tool").write_text("x")
    (root / "bin/tool").chmod(0o755)
    (root / "var/cache/big").write_text("y")
    archive = tmp_path / "image.tar"
    oci.write(oci.Image("localhost/x:1", {"/": root}, user="10001", skip=("var/cache", "dev")), archive)
    with tarfile.open(archive) as tar:

        def blob(digest: str) -> bytes:
            data = tar.extractfile("blobs/" + digest.replace(":", "/")).read()  # type: ignore[union-attr]
            assert digest == "sha256:" + hashlib.sha256(data).hexdigest()
            return data

        index = json.load(tar.extractfile("index.json"))  # type: ignore[arg-type]
        manifest = json.loads(blob(index["manifests"][0]["digest"]))
        assert index["manifests"][0]["annotations"]["io.containerd.image.name"] == "localhost/x:1"
        config = json.loads(blob(manifest["config"]["digest"]))
        assert config["config"]["User"] == "10001"
        assert config["rootfs"]["diff_ids"] == [manifest["layers"][0]["digest"]]
        (tmp_path / "layer.tar").write_bytes(blob(manifest["layers"][0]["digest"]))
    with tarfile.open(tmp_path / "layer.tar") as layer:
        members = {m.name.removeprefix("./"): m for m in layer.getmembers()}
    assert "var/cache" in members
    assert "var/cache/big" not in members
    assert members["bin/tool"].mode == 0o755
