"""Real SGLang on a CPU, in an environment of its own: how it is built (`environment`) and started (`launch`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from colchis.components.engine.sglang_cpu import environment
from colchis.components.errors import BadConfig

MOST_ADAPTERS = 3
"""The one that is served, the one before, which requests in flight may name, and the next."""
LAUNCHER = Path(__file__).with_name("launch.py")


def launch_command(
    *,
    model: Path,
    port: int,
    dtype: str = "float32",
    total_tokens: int = 16384,
    running_requests: int = 64,
    weight_version: str = "none",
    more: Sequence[str] = (),
) -> list[str]:
    """Command line of a server on 127.0.0.1 that starts with the weights of `model`, under a label that is no version.
    `more`: SGLang's own arguments.

    BadConfig when the environment has not been built: it takes minutes, so nobody builds it by accident.
    """
    python = environment.find()
    if python is None:
        raise BadConfig(
            "the environment of SGLang has not been built",
            where=str(environment.folder()),
            hint="run `make test-sglang`",
        )
    return [
        *(str(python), "-P", str(LAUNCHER), "--host", "127.0.0.1", "--port", str(port)),
        *("--model-path", str(model), "--dtype", dtype, "--weight-version", weight_version),
        *("--mem-fraction-static", "0.5", "--max-total-tokens", str(total_tokens)),  # the second is what bounds it
        *("--max-running-requests", str(running_requests), "--enable-metrics", *more),
    ]


def adapter_arguments(rank: int, targets: Sequence[str]) -> list[str]:
    """SGLang's arguments for serving adapters of a rank, on the layers `targets`, without any kernel of a GPU."""
    return [
        *("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", str(rank)),
        *("--max-loras-per-batch", str(MOST_ADAPTERS), "--lora-strict-loading", "--lora-target-modules", *targets),
    ]
