"""Tokens per second of the embedded engine against transformers' `generate` in a static batch, in one run.

The engine is a real process asked over HTTP and returns log-probs; `generate` runs in this process on equal prompts,
without log-probs and without HTTP. Both use one thread and sample at temperature 1. Rounds alternate between the two
and the best of each counts, so that a busy machine disturbs both alike.

    OMP_NUM_THREADS=1 nice -n 10 python benchmarks/engine_throughput.py --json engine_throughput.json
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

PROMPT_TOKENS = 12
CONCURRENT = (1, 16, 64)
START_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Result:
    """Tokens per second of one case. `form`: one request with n samples, or as many requests at once."""

    mode: str
    form: str
    concurrent: int
    new_tokens: int
    engine: float
    generate: float

    @property
    def ratio(self) -> float:
        return self.engine / self.generate


class Client:
    """Keeps one connection per thread open."""

    def __init__(self, port: int, threads: int) -> None:
        self.port = port
        self.pool = ThreadPoolExecutor(threads)
        self.connections: dict[int, http.client.HTTPConnection] = {}

    def post(self, slot: int, body: dict[str, Any]) -> Any:
        connection = self.connections.setdefault(slot, http.client.HTTPConnection("127.0.0.1", self.port, timeout=120))
        connection.request("POST", "/generate", json.dumps(body))
        reply = connection.getresponse()
        content = json.loads(reply.read())
        if reply.status != 200:
            raise RuntimeError(f"/generate answered {reply.status}: {content}")
        return content


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


def seconds(work: Callable[[], int], expected_tokens: int) -> float:
    started = time.perf_counter()
    tokens = work()
    elapsed = time.perf_counter() - started
    if tokens != expected_tokens:
        raise RuntimeError(f"{tokens} tokens came back, expected {expected_tokens}")
    return elapsed


def compare(
    model: Qwen2ForCausalLM, client: Client, mode: str, form: str, concurrent: int, new_tokens: int, rounds: int
) -> Result:
    """The best round of each side. Eight samples share a prompt, as in a group."""
    prompts = [prompt(number // 8) for number in range(concurrent)]
    params = {"max_new_tokens": new_tokens, "ignore_eos": True}
    repeats = max(1, 64 // concurrent) if form == "requests" else 1

    def by_requests() -> int:
        def one(slot: int) -> int:
            body = {"input_ids": prompts[slot], "sampling_params": params, "return_logprob": True}
            return sum(len(client.post(slot, body)["output_ids"]) for _ in range(repeats))

        return sum(client.pool.map(one, range(concurrent)))

    def by_batch() -> int:
        answers = client.post(0, {"input_ids": prompts, "sampling_params": params, "return_logprob": True})
        return sum(len(answer["output_ids"]) for answer in answers)

    def by_generate() -> int:
        ids = torch.tensor(prompts)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
        return int((output.shape[1] - PROMPT_TOKENS) * output.shape[0])

    engine_side = by_batch if form == "batch" else by_requests
    tokens = concurrent * new_tokens
    engine_s, generate_s = [], []
    for round_number in range(rounds + 1):
        engine = seconds(engine_side, tokens * repeats) / repeats
        generate = seconds(by_generate, tokens)
        if round_number:
            engine_s.append(engine)
            generate_s.append(generate)
    return Result(mode, form, concurrent, new_tokens, tokens / min(engine_s), tokens / min(generate_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results there, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model = make_model(Path(folder), arguments.layers, arguments.hidden)
        print(f"{'mode':14} {'form':9} {'concurrent':>10} {'new':>4} {'engine tok/s':>13} {'generate':>9} {'ratio':>6}")
        for mode in ("plain", "deterministic"):
            process, port = start_engine(Path(folder), deterministic=mode == "deterministic")
            client = Client(port, max(CONCURRENT))
            try:
                for form in ("batch", "requests"):
                    for new_tokens in (5, 64):
                        for concurrent in CONCURRENT:
                            result = compare(model, client, mode, form, concurrent, new_tokens, arguments.rounds)
                            results.append(result)
                            print(
                                f"{mode:14} {form:9} {concurrent:10} {new_tokens:4} {result.engine:13.0f} "
                                f"{result.generate:9.0f} {result.ratio:6.2f}",
                                flush=True,
                            )
            finally:
                process.terminate()
                process.wait(20)
    if arguments.json is not None:
        rows = [{**asdict(result), "ratio": result.ratio} for result in results]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
