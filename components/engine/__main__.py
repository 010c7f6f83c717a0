"""Starts an embedded engine: `python -m colchis.components.engine --port 30001 --model-path DIR`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import FrameType
from typing import Literal

import click
import torch
import uvicorn

import colchis
from colchis.components.credentials import credential
from colchis.components.engine.server import build_app
from colchis.components.engine.service import Engine
from colchis.components.engine.settings import EngineSettings
from colchis.components.errors import BadConfig, Bug, ColchisError

SWITCH_INTERVAL_S = 0.0005

EXAMPLE = """
\b
Example:
  python -m colchis.components.engine --port 30001 --deterministic &
  curl -s 127.0.0.1:30001/update_weights_from_disk -H 'content-type: application/json' \\
       -d '{"model_path": "/models/tiny", "weight_version": "0"}'
  curl -s 127.0.0.1:30001/generate \\
       -d '{"input_ids": [1, 2, 3], "return_logprob": true, "sampling_params": {"max_new_tokens": 5}}'
"""


class EngineServer(uvicorn.Server):
    """uvicorn that ends what is in flight when it is told to stop, instead of waiting for long answers."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        def finish() -> None:
            self.engine.scheduler.abort_all("the engine is shutting down")

        self.engine.scheduler.post(finish)
        super().handle_exit(sig, frame)


def serve(settings: EngineSettings) -> None:
    """Serves until SIGTERM or SIGINT. Raises BadData when `model_path` is no good, Bug when the scheduler crashed."""
    torch.set_num_threads(settings.threads)
    # Every torch call releases the GIL; with Python's 5 ms the decode loop would wait that long behind each request.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    server: EngineServer

    def on_crash() -> None:
        server.should_exit = True

    engine = Engine(settings, on_crash)
    config = uvicorn.Config(
        build_app(engine),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=5,
        # Longer than any client keeps an idle connection: the side that closes first must be the client, or a request
        # meets a closing connection between two iterations.
        timeout_keep_alive=300,
        backlog=4096,
    )
    server = EngineServer(config, engine)
    try:
        server.run()
    except SystemExit:
        # uvicorn's own exit after a failed start says less than the error does.
        if engine.start_error is None:
            raise
    if engine.start_error is not None:
        raise engine.start_error
    if engine.crashed:
        raise Bug("the scheduler ended on an error of its own, see the log above")


@click.command(epilog=EXAMPLE)
@click.version_option(colchis.__version__, message=f"colchis engine %(version)s, commit {colchis.__commit__}")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(1, 65535), required=True)
@click.option("--model-path", type=click.Path(path_type=Path), help="Model directory (config.json, *.safetensors).")
@click.option("--weight-version", default="none", show_default=True, help="Label of the weights at start.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Of weights and cache; auto: bfloat16 when all of the first weights are, else float32. Later ones are cast.",
)
@click.option("--deterministic", is_flag=True, help="A sample's bits depend on weights, prompt, params and seed only.")
@click.option("--max-running-requests", type=click.IntRange(1, 4096), default=64, show_default=True)
@click.option("--max-total-tokens", type=click.IntRange(64), default=65536, show_default=True, help="Cache positions.")
@click.option("--context-length", type=click.IntRange(2), help="Lower the model's own context limit.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of one product.")
@click.option("--api-key-env", help="Name of the environment variable that holds the bearer token to ask for.")
def main(
    host: str,
    port: int,
    model_path: Path | None,
    weight_version: str,
    dtype: Literal["auto", "float32", "bfloat16"],
    deterministic: bool,
    max_running_requests: int,
    max_total_tokens: int,
    context_length: int | None,
    threads: int,
    api_key_env: str | None,
) -> None:
    """Embedded rollout engine: SGLang's HTTP routes for Llama, Qwen2 and Qwen3 on a CPU."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    try:
        api_key = None
        if api_key_env is not None:
            api_key = credential(api_key_env)
            if not api_key:
                raise BadConfig(f"--api-key-env names {api_key_env}, which is not set or empty")
        settings = EngineSettings(
            host=host,
            port=port,
            model_path=model_path,
            weight_version=weight_version,
            dtype=dtype,
            deterministic=deterministic,
            max_running_requests=max_running_requests,
            max_total_tokens=max_total_tokens,
            context_length=context_length,
            threads=threads,
            api_key=api_key,
        )
        serve(settings)
    except ColchisError as error:
        click.echo(f"engine: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
