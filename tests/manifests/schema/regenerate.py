"""Makes kinds.json: closed schemas of the kinds in manifests/, from the projects' own definitions.

    python tests/manifests/schema/regenerate.py

Sources are Go modules (module proxy): the OpenAPI document of Kubernetes, the CRDs of Flux and of Argo CD. Argo Workflows
has its own in workflows/schema. Closed means that an object takes only the declared fields; descriptions, defaults and
`status` are left out.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
KUBERNETES = "k8s.io/kubernetes@v1.36.3"
PREFIX = "io.k8s.api."
METADATA = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
BUILT_IN = {
    **dict.fromkeys(
        (
            *("v1/ConfigMap", "v1/Namespace", "v1/PersistentVolume", "v1/PersistentVolumeClaim"),
            *("v1/Secret", "v1/Service", "v1/ServiceAccount"),
        ),
        "core",
    ),
    "apps/v1/StatefulSet": "apps",
    "policy/v1/PodDisruptionBudget": "policy",
    "networking.k8s.io/v1/NetworkPolicy": "networking",
    "rbac.authorization.k8s.io/v1/Role": "rbac",
    "rbac.authorization.k8s.io/v1/RoleBinding": "rbac",
    "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy": "admissionregistration",
    "admissionregistration.k8s.io/v1/MutatingAdmissionPolicyBinding": "admissionregistration",
}
"""apiVersion/kind -> the group's name in the OpenAPI document."""
CRDS = {
    "github.com/fluxcd/source-controller@v1.9.6": ["config/crd/bases/source.toolkit.fluxcd.io_gitrepositories.yaml"],
    "github.com/fluxcd/kustomize-controller@v1.9.6": [
        "config/crd/bases/kustomize.toolkit.fluxcd.io_kustomizations.yaml"
    ],
    "github.com/argoproj/argo-cd/v3@v3.4.0": [
        "manifests/crds/applicationset-crd.yaml",
        "manifests/crds/appproject-crd.yaml",
    ],
}
LOOSE = {
    "io.k8s.apimachinery.pkg.api.resource.Quantity": {"type": ["string", "number"]},
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString": {"type": ["string", "integer"]},
}

Schema = Any


def module(name: str) -> Path:
    """Folder of a Go module (downloaded when missing)."""
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "go.mod").write_text("module x\n")
        command = ["go", "mod", "download", "-json", name]
        done = subprocess.run(command, cwd=scratch, check=True, capture_output=True, text=True)
    return Path(json.loads(done.stdout)["Dir"])


def built_in(definitions: dict[str, Schema], closed: Any) -> tuple[dict[str, Schema], dict[str, Schema]]:
    """(apiVersion/kind -> schema, the definitions that they refer to)."""
    needed: dict[str, Schema] = {}

    def referred(part: Schema) -> Schema:
        if isinstance(part, list):
            return [referred(item) for item in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            name = part["$ref"].removeprefix("#/definitions/")
            if name not in needed:
                needed[name] = {}
                needed[name] = LOOSE.get(name) or referred(without_status(closed(definitions[name])))
            return {"$ref": f"#/$defs/{name}"}
        return {key: referred(value) for key, value in part.items()}

    kinds = {}
    for kind, group in BUILT_IN.items():
        version, name = kind.split("/")[-2:]
        kinds[kind] = referred({"$ref": f"#/definitions/{PREFIX}{group}.{version}.{name}"})
    return kinds, needed


def without_status(schema: Schema) -> Schema:
    schema.get("properties", {}).pop("status", None)
    return schema


def main() -> None:
    source = HERE.parents[2] / "workflows/schema/regenerate.py"
    spec = importlib.util.spec_from_file_location("argo_schema", source)
    assert spec is not None
    assert spec.loader is not None
    argo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(argo)

    document = json.loads((module(KUBERNETES) / "api/openapi-spec/swagger.json").read_text())
    kinds, definitions = built_in(document["definitions"], argo.closed)
    for name, paths in CRDS.items():
        for path in paths:
            crd = yaml.load((module(name) / path).read_text(), Loader=yaml.CSafeLoader)
            for version in crd["spec"]["versions"]:
                if not version["storage"]:
                    continue
                schema = without_status(argo.closed(version["schema"]["openAPIV3Schema"]))
                schema["properties"]["metadata"] = {"$ref": f"#/$defs/{METADATA}"}
                kind = f"{crd['spec']['group']}/{version['name']}/{crd['spec']['names']['kind']}"
                kinds[kind] = schema
    whole = argo.shared({"kinds": kinds})
    definitions |= whole["$defs"]
    text = json.dumps({"kinds": whole["kinds"], "$defs": definitions}, sort_keys=True, separators=(",", ":"))
    (HERE / "kinds.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
