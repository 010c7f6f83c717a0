"""TCP ports on loopback for what is started here, chosen where the kernel puts no connection of its own."""

from __future__ import annotations

import random
import socket

from colchis.components.errors import Temporary

_LOWEST, _HIGHEST = 10_240, 29_999
"""Above the services that everybody knows, below Kubernetes' node ports and, by default, Linux's outgoing connections."""
_TRIES = 1000


def free_port() -> int:
    """A port that nothing holds. Temporary when there is none."""
    return free_ports(1)[0]


def free_ports(count: int, *, also_above: int | None = None) -> list[int]:
    """`count` distinct ports that nothing holds; of the first, the one `also_above` higher is free as well.

    A port that a listener will take in a second must not be one that the kernel may give to some connection meanwhile, which
    is what binding to port 0 would return.
    """
    pick = random.SystemRandom()
    chosen: list[int] = []
    reserved: set[int] = set()
    for _ in range(_TRIES):
        above = also_above if also_above is not None and not chosen else 0
        port = pick.randint(_LOWEST, _HIGHEST - above)
        if port in {*chosen, *reserved} or not is_free(port) or not is_free(port + above):
            continue
        reserved.add(port + above)
        chosen.append(port)
        if len(chosen) == count:
            return chosen
    raise Temporary(f"no {count} free ports on 127.0.0.1", hint="end what holds them and run again")


def is_free(port: int) -> bool:
    """Whether a listener could take it now."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
