"""Tokens per second of the embedded engine against transformers' `generate` in a static batch, in one run.

The engine is a real process asked over HTTP and returns log-probs; `generate` runs in this process on equal prompts,
without log-probs and without HTTP. Both use one thread and sample at temperature 1. Requests come from a process of their
own (closed_loop.py), as they would from another pod: `client` is how much of one core it used. Rounds alternate between
the two sides and the best of each counts, so that a busy machine disturbs both alike.

    OMP_NUM_THREADS=1 python benchmarks/engine_throughput.py --json engine_throughput.json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

PROMPT_TOKENS = 12
TURNS = {1: 64, 16: 8, 64: 8}
"""How often each of so many requests at once is sent, one after the other: the turns that a rate is taken over."""
START_DEADLINE_S = 120.0
CLOSED_LOOP = Path(__file__).with_name("closed_loop.py")


@dataclass(frozen=True)
class Result:
    """Tokens per second of one case. `form`: one request with all prompts, or as many requests at once as prompts."""

    mode: str
    form: str
    concurrent: int
    new_tokens: int
    engine: float
    generate: float
    client: float
    """CPU seconds of the load generator per second, in the engine's best round."""

    @property
    def ratio(self) -> float:
        return self.engine / self.generate


@dataclass(frozen=True)
class Measured:
    """What one order to the load generator took."""

    seconds: float
    cpu_s: float
    tokens: int


class Client:
    """The load generator's process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CLOSED_LOOP)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, port: int, bodies: list[dict[str, Any]], repeats: int) -> Measured:
        """All bodies at once, each `repeats` times one after the other."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps({"port": port, "bodies": bodies, "repeats": repeats}) + "\n")
        self.process.stdin.flush()
        reply = json.loads(self.process.stdout.readline() or "{}")
        if not reply:
            raise RuntimeError("the load generator ended, see its error above")
        tokens = 0
        for answer in reply["answers"]:
            tokens += sum(len(item["output_ids"]) for item in (answer if isinstance(answer, list) else [answer]))
        return Measured(reply["seconds"], reply["cpu_s"], tokens)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def make_model(folder: Path, layers: int, hidden: int) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=100,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def start_engine(folder: Path, *, deterministic: bool) -> tuple[subprocess.Popen[bytes], int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "colchis.components.engine", "--port", str(port), "--model-path", str(folder)]
    process = subprocess.Popen([*command, *(["--deterministic"] if deterministic else [])])
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), 1):
                return process, port
        except OSError:
            if process.poll() is not None:
                raise RuntimeError(f"the engine exited with {process.returncode}") from None
            time.sleep(0.1)
    raise TimeoutError(f"the engine did not listen within {START_DEADLINE_S} s")


def prompt(number: int) -> list[int]:
    return [2 + (7 * number + place) % 97 for place in range(PROMPT_TOKENS)]


def compare(
    model: Qwen2ForCausalLM,
    client: Client,
    port: int,
    mode: str,
    form: str,
    concurrent: int,
    new_tokens: int,
    rounds: int,
) -> Result:
    """The best round of each side. Eight samples share a prompt, as in a group."""
    prompts = [prompt(number // 8) for number in range(concurrent)]
    rest = {"sampling_params": {"max_new_tokens": new_tokens, "ignore_eos": True}, "return_logprob": True}
    bodies = [{"input_ids": prompts, **rest}] if form == "batch" else [{"input_ids": p, **rest} for p in prompts]
    repeats = TURNS[concurrent] if form == "requests" else 1

    def by_engine() -> Measured:
        measured = client.ask(port, bodies, repeats)
        return Measured(measured.seconds / repeats, measured.cpu_s / repeats, measured.tokens // repeats)

    def by_generate() -> Measured:
        ids = torch.tensor(prompts)
        started = time.perf_counter()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
        return Measured(time.perf_counter() - started, 0.0, int((output.shape[1] - PROMPT_TOKENS) * output.shape[0]))

    best: dict[Callable[[], Measured], Measured] = {}
    for round_number in range(rounds + 1):
        for side in (by_engine, by_generate):
            measured = side()
            if measured.tokens != concurrent * new_tokens:
                raise RuntimeError(f"{measured.tokens} tokens came back, expected {concurrent * new_tokens}")
            if round_number and (side not in best or measured.seconds < best[side].seconds):
                best[side] = measured
    engine, generate = best[by_engine], best[by_generate]
    tokens = concurrent * new_tokens
    return Result(
        mode,
        form,
        concurrent,
        new_tokens,
        tokens / engine.seconds,
        tokens / generate.seconds,
        engine.cpu_s / engine.seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mode", nargs="+", default=["plain", "deterministic"], help="which of these to measure")
    parser.add_argument("--form", nargs="+", default=["batch", "requests"])
    parser.add_argument("--new-tokens", nargs="+", type=int, default=[5, 64])
    parser.add_argument("--json", type=Path, help="write the results there, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model = make_model(Path(folder), arguments.layers, arguments.hidden)
        print(
            f"{'mode':14} {'form':9} {'concurrent':>10} {'new':>4} {'engine tok/s':>13} {'generate':>9} {'ratio':>6} "
            f"{'client':>7}"
        )
        client = Client()
        for mode in arguments.mode:
            process, port = start_engine(Path(folder), deterministic=mode == "deterministic")
            try:
                for form in arguments.form:
                    for new_tokens in arguments.new_tokens:
                        for concurrent in TURNS:
                            result = compare(model, client, port, mode, form, concurrent, new_tokens, arguments.rounds)
                            results.append(result)
                            print(
                                f"{mode:14} {form:9} {concurrent:10} {new_tokens:4} {result.engine:13.0f} "
                                f"{result.generate:9.0f} {result.ratio:6.2f} {result.client:7.2f}",
                                flush=True,
                            )
            finally:
                process.terminate()
                process.wait(20)
        client.close()
    if arguments.json is not None:
        rows = [{**asdict(result), "ratio": result.ratio} for result in results]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
