"""Inputs by content: the same folder is the same input, and a changed one never passes for it."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from minio import Minio

from colchis.components.errors import BadConfig, BadData
from colchis.components.store import Store, StoreSettings, download_input, keys, read_input, upload_input
from colchis.components.store.record import sealed
from tests.faults import FaultProxy

LARGE_BYTES = (16 << 20) + 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "ä b.txt").write_text("text")
    (folder / "empty").touch()
    (folder / "manifest.json").write_text("[]")
    return folder


def test_a_folder_comes_back_as_it_was(store: Store, folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").write_bytes(os.urandom(LARGE_BYTES))
    (folder / ".cache").mkdir()
    (folder / ".cache" / "stamp").write_text("12:00")
    digest = upload_input(store, folder)
    manifest = download_input(store, digest, tmp_path / "back")
    names = ["config.json", "empty", "manifest.json", "model.safetensors", "sub/ä b.txt"]
    assert [file.name for file in manifest.files] == names
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    assert not (tmp_path / "back" / ".cache").exists()
    assert all(file.sha256 for file in manifest.files)


def test_the_digest_is_of_the_content(store: Store, folder: Path, tmp_path: Path) -> None:
    """Neither times nor order nor the place of the folder matter; a byte or a name does."""
    digest = upload_input(store, folder)
    moved = tmp_path / "elsewhere"
    folder.rename(moved)
    os.utime(moved / "config.json", (0, 0))
    assert upload_input(store, moved) == digest
    (moved / "config.json").write_text("[]")
    changed = upload_input(store, moved)
    (moved / "config.json").rename(moved / "config2.json")
    assert len({digest, changed, upload_input(store, moved)}) == 3
    assert download_input(store, digest, tmp_path / "back").files[0].bytes == 2
    assert (tmp_path / "back" / "config.json").read_text() == "{}"


def test_uploading_again_sends_nothing(faulty: Store, proxy: FaultProxy, folder: Path) -> None:
    digest = upload_input(faulty, folder)
    sent = proxy.count("PUT", "")
    assert upload_input(faulty, folder) == digest
    assert proxy.count("PUT", "") == sent


def test_an_interrupted_upload_is_no_input_and_goes_on(faulty: Store, proxy: FaultProxy, folder: Path) -> None:
    """Without its manifest an input is not there; files that are there and right are not sent again."""
    digest = upload_input(faulty, folder)
    faulty.delete(keys.input_manifest(digest))
    faulty.delete(keys.input_file(digest, "empty"))
    faulty.put(keys.input_file(digest, "config.json"), b"[]")  # same size, other content
    with pytest.raises(BadData, match="no such object"):
        read_input(faulty, digest)
    sent = proxy.count("PUT", "")
    assert upload_input(faulty, folder) == digest
    assert proxy.count("PUT", "") - sent == 3
    faulty.verify(read_input(faulty, digest).files[0])


def test_links_are_content(store: Store, folder: Path, tmp_path: Path) -> None:
    """Hugging Face keeps files as links into a cache."""
    digest = upload_input(store, folder)
    blob = tmp_path / "blob"
    (folder / "config.json").rename(blob)
    (folder / "config.json").symlink_to(blob)
    assert upload_input(store, folder) == digest


def test_a_damaged_file_is_refused(
    store: Store, store_settings: StoreSettings, other_client: Minio, folder: Path, tmp_path: Path
) -> None:
    digest = upload_input(store, folder)
    other_client.put_object(store_settings.bucket, keys.input_file(digest, "config.json"), io.BytesIO(b"{]"), 2)
    with pytest.raises(BadData, match=r"'config\.json'.*sha256"):
        download_input(store, digest, tmp_path / "back")


def test_a_manifest_that_is_not_of_its_name_is_refused(store: Store, folder: Path) -> None:
    """Somebody who edits a manifest changes what the input is."""
    digest = upload_input(store, folder)
    manifest = read_input(store, digest)
    store.put(keys.input_manifest(digest), manifest.model_copy(update={"files": manifest.files[:-1]}).to_bytes())
    with pytest.raises(BadData, match=f"input {digest[:12]} has the content of"):
        read_input(store, digest)
    store.put(keys.input_manifest(digest), sealed({}))
    with pytest.raises(BadData, match="files"):
        read_input(store, digest)


def test_what_is_no_folder_of_files(store: Store, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="no such folder"):
        upload_input(store, tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadConfig, match="no files"):
        upload_input(store, tmp_path / "empty")
