"""Keeps the names of Services in step with the cluster, in a hosts file that dnsmasq reads again when it changes.

    python names.py KUBECONFIG FILE

What CoreDNS does elsewhere: a Service is its address; a headless one is the addresses of its pods, each of which has a
name of its own too. It waits for an API server that went away.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client, config, watch

DOMAIN = "svc.cluster.local"
Key = tuple[str, str, str]
"""(kind, namespace, name)."""


class Names:
    """Thread-safe; writes the file when an event changed what it says."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._lines: dict[Key, list[str]] = {}
        self._written = ""

    def follow(self, listing: Any, lines_of: Any) -> None:
        """Every change of one kind of object, from now on and for ever."""
        while True:
            try:
                for event in watch.Watch().stream(listing):
                    thing = event["object"]
                    key = (type(thing).__name__, thing.metadata.namespace, thing.metadata.name)
                    self._set(key, [] if event["type"] == "DELETED" else lines_of(thing))
            except (client.ApiException, urllib3.exceptions.HTTPError) as error:
                print(f"again in a second: {error}", flush=True)
                time.sleep(1.0)

    def _set(self, key: Key, lines: list[str]) -> None:
        with self._lock:
            self._lines[key] = lines
            text = "".join(f"{line}\n" for key in sorted(self._lines) for line in self._lines[key])
            if text != self._written:
                unfinished = self._path.parent.parent / "names.new"
                unfinished.write_text(text)
                unfinished.replace(self._path)
                self._written = text


def of_service(service: Any) -> list[str]:
    """A Service with an address."""
    address, metadata = service.spec.cluster_ip, service.metadata
    if not address or address == "None":
        return []
    return [f"{address} {metadata.name}.{metadata.namespace}.{DOMAIN}"]


def of_slice(endpoints: Any) -> list[str]:
    """The pods of a headless Service (its mark is on the slice); unready ones when the Service publishes them."""
    labels = endpoints.metadata.labels or {}
    if "service.kubernetes.io/headless" not in labels:
        return []
    name = f"{labels['kubernetes.io/service-name']}.{endpoints.metadata.namespace}.{DOMAIN}"
    lines = []
    for endpoint in endpoints.endpoints or []:
        if endpoint.conditions.ready is not False:
            for address in endpoint.addresses:
                lines.append(f"{address} {name}" + (f" {endpoint.hostname}.{name}" if endpoint.hostname else ""))
    return lines


def main(kubeconfig: str, path: Path) -> None:
    config.load_kube_config(kubeconfig)
    names = Names(path)
    services, slices = client.CoreV1Api(), client.DiscoveryV1Api()
    other = threading.Thread(
        target=names.follow, args=(services.list_service_for_all_namespaces, of_service), daemon=True
    )
    other.start()
    names.follow(slices.list_endpoint_slice_for_all_namespaces, of_slice)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
