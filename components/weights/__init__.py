"""From the trainer's tensors to the engines' tensors: manifest, publication, fetch, checksums, activation. Torch-free."""

from colchis.components.records.weights import TensorEntry, WeightsManifest
from colchis.components.weights.activate import (
    AgentClient,
    Agents,
    activate_all,
    passing,
    prepare_all,
    probe_all,
    verify_all,
    verify_published,
)
from colchis.components.weights.manifest import build, describe
from colchis.components.weights.publish import base_manifest, publish, read_manifest

__all__ = [
    "AgentClient",
    "Agents",
    "TensorEntry",
    "WeightsManifest",
    "activate_all",
    "base_manifest",
    "build",
    "describe",
    "passing",
    "prepare_all",
    "probe_all",
    "publish",
    "read_manifest",
    "verify_all",
    "verify_published",
]
