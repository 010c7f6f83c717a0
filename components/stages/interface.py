"""What templates and stages agree on: commands, options, outputs. They are released together, but deployed apart."""

from __future__ import annotations

from colchis.components.errors import BadConfig

INTERFACE = 1
"""Raised with any change that an installed template would not know; tests/stages/test_interface.py says when."""


def check_interface(rendered: int | None) -> None:
    """BadConfig when the template was rendered for stages of another interface. None: called by hand."""
    if rendered is None or rendered == INTERFACE:
        return
    older = "the template is older than" if rendered < INTERFACE else "the template is newer than"
    raise BadConfig(
        f"{older} the image of the stages: it was rendered for interface {rendered}, this image has {INTERFACE}",
        hint="apply manifests/ and use images of the same release",
    )
