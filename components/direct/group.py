"""The process group of one direct transfer: rank 0 has the weights, the others are the ranks of one engine.

Each engine has a group of its own with the sender. A larger group would share the sender's bandwidth better, but one engine
that dies in it leaves all the others with half a version.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any, Literal, Self

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    ProcessGroup,
    Store,
    _new_process_group_helper,
    _world,
    destroy_process_group,
)

from colchis.components.errors import PeerUnavailable

BackendName = Literal["gloo", "nccl"]


class Rendezvous:
    """Where the ranks of a group find each other, on the side of rank 0. It listens on `host` alone."""

    def __init__(self, host: str, ranks: int, timeout_s: float) -> None:
        self.host, self.ranks = host, ranks
        self._timeout = timedelta(seconds=timeout_s)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.create_server((host, 0), family=family) as listener:
                self.port: int = listener.getsockname()[1]
                self._store = TCPStore(
                    host,
                    self.port,
                    ranks,
                    is_master=True,
                    timeout=self._timeout,
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )
        except (OSError, RuntimeError) as e:
            raise PeerUnavailable(f"nobody can be waited for at {host}: {e}") from e

    def meet(self, name: str, backend: BackendName) -> Group:
        """Wait for the other ranks. PeerUnavailable when one does not come in time."""
        return Group(self._store, 0, self.ranks, name, backend, self._timeout)


class Group:
    """A process group that exists for one transfer. Use as a context manager."""

    def __init__(
        self, store: Store, rank: int, ranks: int, name: str, backend: BackendName, timeout: timedelta
    ) -> None:
        if isinstance(store, TCPStore) and is_loopback(store.host):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # for good; else gloo listens where the host's name leads
        prefixed: Any = PrefixStore(name, store)  # twice, for the helper does it too: as SGLang's rank
        make: Any = _new_process_group_helper
        try:
            self._group: ProcessGroup = make(
                ranks, rank, [], Backend(backend), prefixed, group_name=name, timeout=timeout
            )[0]
        except (RuntimeError, ValueError) as e:
            raise PeerUnavailable(f"the process group '{name}' did not come together: {e}") from e
        _world.pg_group_ranks[self._group] = {member: member for member in range(ranks)}  # else it cannot be destroyed

    @classmethod
    def join(
        cls, host: str, port: int, *, rank: int, ranks: int, name: str, backend: BackendName, timeout_s: float
    ) -> Self:
        """As another rank than 0. PeerUnavailable when the ranks do not all come in time."""
        timeout = timedelta(seconds=timeout_s)
        try:
            store = TCPStore(host, port, ranks, is_master=False, timeout=timeout, wait_for_workers=False)
        except RuntimeError as e:
            raise PeerUnavailable(f"nobody waits at {host}:{port} with weights: {e}") from e
        return cls(store, rank, ranks, name, backend, timeout)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """From rank 0 to all, in place. PeerUnavailable when a rank is gone or does not take part in time."""
        try:
            self._group.broadcast(tensor, 0).wait()
        except RuntimeError as e:
            raise PeerUnavailable(f"a broadcast broke off: {e}") from e

    def close(self) -> None:
        """Leave the group; ranks that still wait for it get an error."""
        destroy_process_group(self._group)
        del self._group  # its connections end with the object

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_loopback(host: str) -> bool:
    """Whether an address is reached from its own machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
