"""The number that tells a template of one release from the stages of another."""

from __future__ import annotations

import hashlib
import json

import click
import pytest

from colchis.components.__main__ import STAGES, cli
from colchis.components.errors import BadConfig
from colchis.components.stages.interface import INTERFACE, check_interface

SURFACES = {1: "34f557f8d3c1264b"}
"""Interface -> digest of what stages take. Add one, and raise INTERFACE, when an option comes, goes or changes its name."""


def surface() -> str:
    """Stages with their options, and whether these must be given. No template calls the agent."""
    taken = {}
    for name in STAGES.keys() - {"agent"}:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        taken[name] = sorted((option, p.required) for p in command.params for option in p.opts)
    return hashlib.sha256(json.dumps(taken, sort_keys=True).encode()).hexdigest()[:16]


def test_stages_that_take_something_else_have_another_number() -> None:
    """Fault: stages that an installed template calls as they were, and that fail one by one in the middle of a run."""
    assert {INTERFACE: surface()}.items() <= SURFACES.items()


def test_another_release_is_refused_with_what_to_do() -> None:
    check_interface(INTERFACE)
    check_interface(None)
    with pytest.raises(BadConfig, match=r"template is older than the image .*apply manifests/"):
        check_interface(INTERFACE - 1)
    with pytest.raises(BadConfig, match="template is newer than the image"):
        check_interface(INTERFACE + 1)
