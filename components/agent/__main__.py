"""`python -m colchis.components.agent --engine-url URL --port P --staging DIR`."""

from __future__ import annotations

import logging
import sys

import click

from colchis.components import logs
from colchis.components.agent.command import command
from colchis.components.errors import BadConfig, ColchisError


def main() -> int:
    """Exit code of the agent."""
    logs.set_up()
    try:
        command.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return BadConfig.exit_code
    except ColchisError as error:
        logging.getLogger("colchis").error("%s: %s", type(error).__name__, error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
