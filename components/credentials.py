"""Keys and tokens from the environment."""

from __future__ import annotations

import os

from colchis.components.errors import BadConfig


def credential(variable: str) -> str:
    """The key or token in a variable, without the space around it that files and editors add; empty when it is not set.

    BadConfig, which does not show it, when it cannot be sent in a header.
    """
    value = os.environ.get(variable, "").strip()
    if not value.isascii() or not value.isprintable() or " " in value:
        raise BadConfig(
            f"{variable} has characters that no header can have",
            hint="use printable ASCII without spaces, e.g. `openssl rand -hex 16`",
        )
    return value
