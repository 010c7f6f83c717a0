"""What the commands share: arguments, options, examples."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click


class Name(click.ParamType[str]):
    """The name of a run or a pool, refused before anything starts."""

    name = "name"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from colchis.components.store import keys

        return keys.name(param.human_readable_name if param else "name", value)


RUN = click.argument("run", type=Name())
RUN_NAME = click.option(
    "--run", "name", type=Name(), help="Name of the run. [default: the file's or its folder's name]"
)
CONFIG = click.argument("config", type=click.Path(path_type=Path))
SET = click.option("--set", "assignments", multiple=True, metavar="SECTION.FIELD=VALUE", help="Override one field.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
NAMESPACE = click.option(
    "-n",
    "--namespace",
    default=lambda: os.environ.get("COLCHIS_NAMESPACE", "colchis"),
    help="Namespace of the cluster. [default: $COLCHIS_NAMESPACE, or colchis]",
)
CONTEXT = click.option("--context", help="Context of the kubeconfig. [default: its current one]")
POOL = click.option(
    "--pool", type=Name(), default="main", show_default=True, help="Pool of engines that the run leases."
)
SHAPE = click.option("--shape", default="cpu", show_default=True, help="Which rendered template to run.")


def write_text(path: Path, text: str) -> None:
    """Write a file that the user named. BadConfig when that cannot be."""
    from colchis.components.errors import BadConfig

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise BadConfig(
            f"cannot be written: {e.strerror}", where=str(path), hint="name a file in a folder that exists"
        ) from e


def example(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put an example below a command's options."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        inner.__doc__ = f"{inspect.getdoc(function)}\n\n\b\nExample:\n  {text}\n"
        return inner

    return decorate
