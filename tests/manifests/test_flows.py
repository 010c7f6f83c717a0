"""The network policies of each overlay allow what docs/security.md says, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from colchis.workflows.documents import Document
from tests.manifests.conftest import overlay_of
from tests.manifests.objects import Pod, find, pods, selects
from tests.manifests.tables import table, words

Json = Any
Flow = tuple[str, str, str]
"""(from, to, port)."""
ADDRESSES = {
    "overlays/test": {"10.244.0.1/32:6443/TCP": "API server", "10.244.0.1/32:8333/TCP": "store"},
    "overlays/dev": {"172.16.0.0/12:6443/TCP": "API server"},
    "overlays/prod": {"203.0.113.1/32:6443/TCP": "API server", "203.0.113.10/32:443/TCP": "store"},
}
ELSEWHERE = {("kube-system", "k8s-app", "kube-dns"): "cluster DNS", ("argo", "app", "argo-server"): "Argo server"}
"""Pods of other namespaces: (namespace, label, value)."""


class Network:
    """Who may speak to whom, as a network plugin reads the policies."""

    def __init__(self, documents: list[Document]) -> None:
        self.addresses = ADDRESSES[overlay_of(documents[0].file)]
        self.policies = [body["spec"] for body in find(documents, "NetworkPolicy").values()]
        self.pods = {pod.name: pod for pod in pods(documents)}

    def flows(self) -> set[Flow]:
        """Those that both sides allow, or the only side that is here."""
        out = {flow for pod in self.pods.values() for flow in self._side(pod, "Egress", "to")}
        into = {(b, a, port) for pod in self.pods.values() for a, b, port in self._side(pod, "Ingress", "from")}
        both = out & into
        outward = {flow for flow in out if flow[1] not in self.pods}
        inward = {flow for flow in into if flow[0] not in self.pods}
        return {self._named(flow) for flow in both | outward | inward}

    def one_sided(self) -> set[Flow]:
        """Between pods of ours, allowed by one of the two."""
        out = {flow for pod in self.pods.values() for flow in self._side(pod, "Egress", "to")}
        into = {(b, a, port) for pod in self.pods.values() for a, b, port in self._side(pod, "Ingress", "from")}
        return {flow for flow in out ^ into if flow[0] in self.pods and flow[1] in self.pods}

    def _side(self, pod: Pod, kind: str, peers: str) -> set[Flow]:
        mine = [p for p in self.policies if kind in p["policyTypes"] and selects(p["podSelector"], pod.labels)]
        if not mine:
            return {(pod.name, "anywhere", "any")}
        found = set()
        for rule in (rule for policy in mine for rule in policy.get(kind.lower(), [])):
            ports = [_ports(p) for p in rule.get("ports", [])] or ["any"]
            for peer in rule.get(peers) or [{}]:
                found |= {(pod.name, other, port) for port in ports for other in self._others(peer, port)}
        return found

    def _others(self, peer: Json, port: str) -> list[str]:
        if "ipBlock" in peer:
            address = f"{peer['ipBlock']['cidr']}:{port}"
            return [self.addresses.get(address, address)]
        if "namespaceSelector" in peer:
            namespace = peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
            labels = peer["podSelector"]["matchLabels"]
            return [ELSEWHERE.get((namespace, *item), str(peer)) for item in labels.items()]
        if "podSelector" in peer:
            return [name for name, pod in self.pods.items() if selects(peer["podSelector"], pod.labels)]
        return ["anywhere"]

    def _named(self, flow: Flow) -> Flow:
        start, end, port = flow
        end = "store" if end in ("seaweedfs", "minio") else end
        return start, end, "store" if end == "store" else port


def _ports(port: Json) -> str:
    numbers = f"{port['port']}-{port['endPort']}" if "endPort" in port else port["port"]
    return f"{numbers}/{port['protocol']}"


def documented(stages: set[str], *, store_is_here: bool, direct: bool) -> set[Flow]:
    """The table, row by row; the Argo server reaches a store here by policy, one elsewhere without us. `direct`: and the
    table of that component."""
    flows = set()
    rows = table("from", "to", "port") + (table("from", "to", "port, with direct transfer") if direct else [])
    for starts, end, ports in rows:
        if starts == "Argo server" and not store_is_here:
            continue
        if starts.startswith("every stage"):
            names = stages - set(words(starts.removeprefix("every stage").removeprefix(" but ")))
        else:
            names = set(words(starts))
        flows |= {(name, end, port) for name in names for port in words(ports)}
    return flows


def network_of(overlay: list[Document]) -> tuple[Network, set[Flow]]:
    network = Network(overlay)
    stages = set(network.pods) - {"engine", "seaweedfs", "minio"}
    store_is_here, direct = bool({"seaweedfs", "minio"} & set(network.pods)), "direct" in overlay[0].file
    return network, documented(stages, store_is_here=store_is_here, direct=direct)


def test_policies_allow_what_the_table_says(overlay: list[Document]) -> None:
    """Fault: a flow that nobody wrote down, or one that is written down and closed."""
    network, expected = network_of(overlay)
    assert len(network.pods) > 9
    assert network.flows() == expected


def test_both_sides_agree(overlay: list[Document]) -> None:
    """Fault: a hole on one side that opens when the other changes."""
    assert Network(overlay).one_sided() == set()


@pytest.mark.parametrize(
    "name", ["default-deny", "samplers-to-engines", "engines-from-stages", "stages-to-store", "reload-to-agents"]
)
def test_a_missing_policy_is_found(overlay: list[Document], name: str) -> None:
    """Fault: a check that cannot fail. Without default-deny, what no other policy selects is open."""
    left = [d for d in overlay if (d.kind, d.name) != ("NetworkPolicy", name)]
    network, expected = network_of(left)
    assert network.flows() != expected or network.one_sided()


def test_a_wider_policy_is_found(overlay: list[Document]) -> None:
    """Fault: a check that cannot fail: any pod may sample."""
    body = copy.deepcopy(find(overlay, "NetworkPolicy")["samplers-to-engines"])
    body["spec"]["podSelector"] = {}
    wider = [Document(d.file, body, d.node) if d.name == "samplers-to-engines" else d for d in overlay]
    network, expected = network_of(wider)
    assert network.flows() != expected or network.one_sided()


def test_who_may_ask_engines_has_their_key(overlay: list[Document]) -> None:
    """Fault: a stage that samples, and is refused by engines that were started with a key."""
    may_ask = {a for a, b, port in Network(overlay).flows() if (b, port) == ("engine", "30000/TCP")}
    assert may_ask == {"rollout", "evaluate"}
    for pod in (pod for pod in pods(overlay) if "colchis.dev/stage" in pod.labels):
        for container in pod.containers:
            has_key = "COLCHIS_ENGINE_KEY" in {variable["name"] for variable in container.get("env", [])}
            assert has_key == (pod.name in may_ask), pod.where
