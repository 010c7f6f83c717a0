"""The engine's own label (`weight_version`), by which every token that it draws is believed. It has three forms:

`5`: weights v5, proven by the engine's own checksums. `unproven-5`: weights are changing, or were found to be wrong; nobody
believes it. `loaded-5-0f3a9c1e`: the load is over and the engine serves again while its agent proves what it holds; the agent
says afterwards (`Status.proven`) whether tokens under this very label were drawn by v5.
"""

from __future__ import annotations

import re
import secrets

_LOADED = re.compile(r"loaded-(0|[1-9][0-9]*)-[0-9a-f]{8}", re.ASCII)


def unproven(version: int) -> str:
    """While weights of a version are being loaded."""
    return f"unproven-{version}"


def loaded(version: int) -> str:
    """From the load to its proof. Differs for each load."""
    return f"loaded-{version}-{secrets.token_hex(4)}"


def proven_version(label: str) -> int | None:
    """The version that a label proves; None for any other label."""
    return int(label) if label.isascii() and label.isdecimal() else None


def loaded_version(label: str) -> int | None:
    """The version that is yet to be proven; None for any other label."""
    found = _LOADED.fullmatch(label)
    return int(found[1]) if found else None
