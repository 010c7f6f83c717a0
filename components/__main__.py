"""`python -m colchis.components STAGE ...`: what every pod runs.

Each stage reads the store, does its part, commits, and writes the outputs that the manifest asks for. Exit codes are
those of `colchis.components.errors`.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import signal
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType

import click

import colchis
from colchis.components import logs
from colchis.components.errors import ColchisError, refused_by_system

STAGES = {
    "begin": "validate the configuration, create or continue the run, decide the window",
    "rollout": "generate one shard of an iteration's trajectories",
    "grade": "score one shard of trajectories (placement 'step')",
    "batch": "advantages, denominators and the packing plan of an iteration",
    "train": "the optimiser step, and the one commit that makes the next version",
    "reload": "one of the five boundaries between new weights and serving engines",
    "evaluate": "greedy accuracy of a version on held-out prompts",
    "close": "release the pool, record the outcome, write the report",
    "agent": "the sidecar beside an engine",
}


LAST_WORD = Path("/dev/termination-log")
"""A file that Kubernetes makes in each container. Argo shows what is in it as the message of a failed node."""


class _Stages(click.Group):
    """Imports a stage only when it is asked for: no stage pays for another's imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(STAGES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in STAGES:
            return None
        module = importlib.import_module(f"colchis.components.stages.{cmd_name}")
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Stages"):
            formatter.write_dl(list(STAGES.items()))


@click.command(cls=_Stages, context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__)
@click.version_option(colchis.__version__, message=f"colchis %(version)s, commit {colchis.__commit__}")
def cli() -> None:
    """The group itself has nothing to do."""


class Terminated(SystemExit):
    """SIGTERM arrived: unwind, save what must survive, end with 143."""

    code = 128 + signal.SIGTERM
    came = False
    """Whether it did. It may be raised inside somebody else's code, which makes another error of it."""


def _on_term(signum: int, frame: FrameType | None) -> None:
    Terminated.came = True
    raise Terminated


def main(argv: list[str] | None = None) -> int:
    """Run one stage; returns the exit code. After a SIGTERM whatever fails is an end by it: a pod that was taken away is
    tried again, one that refused is not."""
    logs.set_up()
    Terminated.came = False
    signal.signal(signal.SIGTERM, _on_term)
    code = _run(argv)
    if code and Terminated.came:
        logging.getLogger("colchis").warning("terminated by SIGTERM")
        return Terminated.code
    return code


def _run(argv: list[str] | None) -> int:
    try:
        cli.main(args=argv, prog_name="python -m colchis.components", standalone_mode=False)
    except click.ClickException as e:
        e.show()
        return 78 if isinstance(e, click.UsageError) else e.exit_code
    except click.Abort:
        return 130
    except ColchisError as e:
        return Terminated.code if Terminated.came else _say(e)
    except Terminated:
        return Terminated.code
    except Exception as e:
        if Terminated.came:
            return Terminated.code
        if isinstance(e, OSError) and (refusal := refused_by_system(e, tempfile.gettempdir())) is not None:
            return _say(refusal)
        traceback.print_exc()
        _leave(e)
        return 70
    return 0


def rehearse() -> None:
    """Do what most stages begin with, and drop it; for a process that waits to become one. Opens no connection."""
    from colchis.components.http_client import pool_client
    from colchis.components.store.requests import preload

    async def nothing() -> None:
        async with pool_client():
            pass

    preload()
    asyncio.run(nothing())


def _say(error: ColchisError) -> int:
    fields = {"exit": error.exit_code}
    logging.getLogger("colchis").error("%s: %s", type(error).__name__, error, extra={"fields": fields})
    _leave(error)
    return error.exit_code


def _leave(error: Exception) -> None:
    """Says why once more, in a pod: its log may be gone before anybody looks, its node's message is not."""
    if LAST_WORD.exists():
        with suppress(OSError):  # the log has said it, and the exit code must not change
            LAST_WORD.write_text(f"{type(error).__name__}: {error}"[:1000], encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
