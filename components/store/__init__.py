"""The object store: client, key layout, commit protocol, inputs, lease, probe. docs/store.md is the whole story."""

from colchis.components.store import keys
from colchis.components.store.commits import Attempt, Commit, find_commit, read_commit
from colchis.components.store.inputs import InputManifest, download_input, read_input, upload_input
from colchis.components.store.keys import StageKey
from colchis.components.store.lease import Lease
from colchis.components.store.payload import Checksums, Payload
from colchis.components.store.probe import probe
from colchis.components.store.record import Record
from colchis.components.store.settings import StoreSettings
from colchis.components.store.store import Store, Stored
from colchis.components.store.transfers import Transfer

__all__ = [
    "Attempt",
    "Checksums",
    "Commit",
    "InputManifest",
    "Lease",
    "Payload",
    "Record",
    "StageKey",
    "Store",
    "StoreSettings",
    "Stored",
    "Transfer",
    "download_input",
    "find_commit",
    "keys",
    "probe",
    "read_commit",
    "read_input",
    "upload_input",
]
