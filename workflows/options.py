"""What the commands share: arguments, options, examples."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

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
POOL = click.option("--pool", default="main", show_default=True, help="Pool of engines that the run leases.")
SHAPE = click.option("--shape", default="cpu", show_default=True, help="Which rendered template to run.")


def example(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put an example below a command's options."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        inner.__doc__ = f"{inspect.getdoc(function)}\n\n\b\nExample:\n  {text}\n"
        return inner

    return decorate
